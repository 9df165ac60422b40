"""The floors of the house: a module imports from lower floors, or from its own folder in the order listed."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "regard"

FLOORS = {
    room: floor
    for floor, rooms in enumerate(
        [
            "arguments axes wide_sums explicit_meshes manual_meshes loading paths records formulas",
            "masks positions theory",
            "scores",
            "engine",
            "attention linear",
            "cache readouts derivation parallel conformance tuning",
            "layers",
            "models",
            "inspection interop planning",
            "training",
            "cli",
            "__main__",
        ]
    )
    for room in rooms.split()
}

# Within a folder, a module may import those before it.
FOLDERS = {
    "cache": "rows contiguous paged",
    "masks": "spans offsets grid data picture alignment tile_kinds bounds mask algebra positional closures"
    " predicates stored_masks keys key_lists block_tables documents intervals diffusion trees neighbourhoods"
    " expressions conventions parsing",
    "positions": "scaling tables rotation",
    "theory": "definition operands notation bilinear gibbs steps gradients hopfield hebbian heads",
    "scores": "cells score placed pointwise distances bilinear_forms",
    "engine": "processors platforms call.options call.stores call.quantized call.page_tables call.problem"
    " call.canonicalization call.hooks call.checkpoint_names call softmax.scoring softmax.dropout"
    " softmax.exponential softmax.sinks softmax.products softmax.online_softmax"
    " softmax.score_rows softmax.merging softmax"
    " flash.device_types flash.blocking flash.tiles flash.sparsity flash.loops flash.whole_tiles"
    " flash.measurements flash.piece_costs flash.tile_choice flash.operands flash.partitioning"
    " flash.preparation flash.tile_scores flash.passes flash.primitives flash.tile_calls flash"
    " hopper.pair_programs hopper.kernel_blocks hopper.kernels hopper.launches hopper.kernel_calls hopper"
    " backends.dense backends.symbolic backends.gathered backends.tiled backends.kernel_primitives"
    " backends.kernel_masks backends.cudnn backends.splash_tpu backends.mosaic_gpu backends"
    " dispatch.registry dispatch.placement dispatch.explanation dispatch.explicit_axes dispatch",
    "derivation": "letters step numbers course number_tables terminal typesetting markup record deriving",
    "readouts": "readout accumulators top_k tiling counting reading labels indexing",
    "parallel": "meshes topologies order division schedule exchange shard ring ring_calls shard_mapping"
    " cost_reports work placements attending",
    "conformance": "written_calls expectations alternatives report promises runners subjects judging"
    " transforms edges checking ours",
    "planning": "chips candidates estimates rings search reports planner parameters residuals step_costs"
    " training_steps",
    "linear": "halving problem chunks devices attention",
    "layers": "choices heads dropout residual projections multi_head compressor indexer latent_attention"
    " short_convolution compressed_cache compressed_attention delta_cache delta derivation feed_forward"
    " expert_shards expert_balance experts blocks",
    "models": "config sharding padding embedding depth stack encoder decoder encoder_decoder classifier"
    " presets logits sampling_settings sampling prompts prefill writing speculation generation beams",
    "training": "settings typed_json compilation metrics corpora vocabularies token_files lazy_modules task"
    " losses"
    " tasks.threshold tasks.copy tasks.reverse tasks.digits tasks.text tasks mesh_specs membership processes"
    " locks checkpoint_files checkpoints run_configs runs sharding head_statistics optimization"
    " programs compiled_updates history work loop",
    "inspection": "visible_text words call_numbers tokens contributions rollouts head_search figures.palette"
    " figures.canvas figures.cell_axes figures.heatmaps figures.matrices figures.curves"
    " figures.patches figures.atlases figures.head_curves figures explorer.codes"
    " explorer.budgets explorer.mask_outlines explorer.head_records explorer.position_curves"
    " explorer.page_document explorer.payload explorer.shell explorer.thumbnails explorer.pages"
    " explorer.exact_tiles explorer.sites explorer.server explorer.live explorer traces.slices"
    " traces.calls traces.files traces.codec traces.predictions traces.stored traces.sequences"
    " traces.arrays traces.trace traces.owners traces.captures traces.padded traces"
    " interventions observations layer_predictions paths recorders head_effects score_parts",
    "interop": "layouts jax_nn flax equinox flex torch_sdpa onnx_tensors onnx_subgraphs onnx_attention"
    " onnx_ops weight_files weight_maps families.entries families.family families.sliding_windows"
    " families.rotary families.bert families.vit families.gpt2 families.llama families.mistral families.qwen"
    " families.gemma2 families.gemma3 families.qwen3_moe families.qwen3_5 families.qwen3_next"
    " families.deepseek_v3 families.deepseek_v32 families.kimi_linear families.t5 families.gpt_oss"
    " families.modernbert families huggingface_configs model_folders huggingface"
    " sentence_embeddings",
    "cli": "plain console declaration continuation spelling sources text_models interruption displays"
    " overview pictures text_readers commands.conformance commands.demo commands.train commands.generate"
    " commands.plot commands.inspect commands.view commands.explain commands.plan commands.tune"
    " commands.doctor commands command_words compiling training supervision inspecting demonstration"
    " generating",
}

# Whom theory judges has none of it, else it would be no oracle: but for these, of these modules.
ORACLES = {"derivation": "notation", "conformance": "definition"}
BANNED = ("util", "utils", "common", "helper", "helpers", "misc")
LINES = 400


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def place(path):
    """('masks', 'grid') for src/regard/masks/grid.py; a folder's __init__ has an empty second part.

    Rooms of a folder within a folder have two names: ('inspection', 'figures.canvas').
    """
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return folder, ".".join(part for part in rest if part != "__init__")


@functools.cache
def imports(source):
    """Every regard module named by an import, lazy ones and those for type checking included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names if alias.name.split(".")[0] == "regard"]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "write imports from the package's root: `from regard.x import y`"
            base = (node.module or "").split(".")
            if base[0] == "regard":
                found += [[*base, alias.name] for alias in node.names]
    # `import regard` and `from regard import attend` reach as high as attention.
    top = ("attend", "derive", "explain", "merge")
    return [["attention"] if len(name) == 1 or name[1] in top else name[1:4] for name in found]


def violations(path, source):
    folder, module = place(path)
    for target, *rest in imports(source):
        if target not in FLOORS:
            if target != "__version__":
                yield f"{folder}.{module} imports unknown {target}"
            continue
        if target != folder:
            if FLOORS[target] >= FLOORS[folder]:
                yield f"{folder} (floor {FLOORS[folder]}) imports {target} (floor {FLOORS[target]})"
            if target == "theory" and rest[:1] != [ORACLES.get(folder)]:
                yield f"{folder} imports {'.'.join((target, *rest))}"
            continue
        order = FOLDERS.get(folder, "").split()
        names = (".".join(rest[:count]) for count in (2, 1))
        inner = next((name for name in names if name and name in order), None)
        if module and inner and order.index(inner) >= order.index(module):
            yield f"{folder}.{module} imports {folder}.{inner}, which is listed after it"


def test_a_module_imports_only_from_below():
    for path in modules():
        folder, module = place(path)
        assert folder in FLOORS, f"{folder} has no floor"
        assert not module or module in FOLDERS[folder].split(), f"{folder}.{module} is not in the order"
    assert [wrong for path in modules() for wrong in violations(path, path.read_text())] == []


def test_the_guard_sees_a_violation():
    grid, codes = ROOT / "masks" / "grid.py", ROOT / "inspection" / "explorer" / "codes.py"
    for path, wrong in (
        (grid, "from regard.attention import attend"),
        (grid, "import regard.engine.backends.dense"),
        (grid, "def f():\n    from regard.masks.algebra import Mask"),
        (grid, "import regard"),
        (ROOT / "models" / "stack.py", "from regard.theory import notation"),
        (codes, "from regard.inspection.explorer import pages"),
    ):
        assert list(violations(path, wrong)), wrong
    assert not list(violations(grid, "from regard.axes import Array"))
    assert not list(violations(codes, "from regard.inspection.figures import palette"))


def test_a_module_is_of_one_size_and_name():
    for path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= LINES, f"{path}: a second concept may live here"
        assert not set(path.relative_to(ROOT).with_suffix("").parts) & set(BANNED), path
        assert not re.search(rf"^def {path.stem}\(", text, re.M), f"{path}: a function has its module's name"


LOADED = """
import sys
import regard
seen = [set(sys.modules)]
for code in (
    "import jax, numpy, jaxtyping, jax.extend.random, jax.numpy",
    "[getattr(regard, name) for name in regard.__all__]",
    "regard.layers.MultiHeadAttention, regard.interop.jax_nn, regard.inspection.figures.save",
):
    exec(code)
    seen.append(set(sys.modules))
for modules in seen:
    print(*sorted({name.split(".")[0] for name in modules}))
"""


def test_importing_regard_is_light():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    alone, allowed, everything, more = (set(line.split()) for line in done.stdout.splitlines())
    assert "jax" not in alone, "names load on first use, so that --help answers at once"
    # What remains is the standard library.
    new = everything - allowed - {"regard"}
    assert not {name for name in new if name not in sys.stdlib_module_names and not name.startswith("_")}
    # Every room is an attribute; what is heavy would be seen.
    assert {"flax", "matplotlib"} <= more - everything
