"""Training over a mesh of eight devices: the numbers of one device, in parts; and what a mesh may be."""

import json
import shutil

import pytest

from mesh_cases import on_eight_devices
from refusals import assert_refused
from regard.training import runs, settings, tasks
from regard.training.membership import find_membership
from regard.training.mesh_specs import MeshSpec, read_mesh
from regard.training.sharding import divide_array
from small_runs import tiny_copy


def check(call):
    on_eight_devices(f"from mesh_runs import *\n{call}")


def test_a_mesh_is_read_and_fits_the_devices():
    assert read_mesh("data=2,fsdp=3,expert=5,sequence=7,tensor=11") == MeshSpec(2, 3, 5, 7, 11)
    assert read_mesh(" tensor = 7 , data=2") == MeshSpec(data=2, tensor=7)
    assert read_mesh("data=2,sequence=4,model=1") == MeshSpec(data=2, sequence=4)
    assert read_mesh("fsdp=*") == read_mesh("fsdp=-1") == MeshSpec(fsdp=-1)
    for text in ("data=2,fsdp=3,sequence=5,tensor=7", "data=1", "fsdp=*,tensor=2"):
        assert str(read_mesh(text)) == text
    assert read_mesh("data=2,tensor=*").fit(6) == MeshSpec(data=2, tensor=3)
    assert read_mesh("data=2,tensor=*").fit(2) == MeshSpec(data=2)


def test_a_mesh_that_is_none_or_does_not_fit_is_refused():
    assert_refused(
        ("data", "expected axes with sizes, such as data=2,tensor=4; got 'data'"),
        ("dta=2", "got 'dta'; did you mean data"),
        ("data=0", r"a number for data, 1 or more, or \*; got '0'"),
        ("data=*,fsdp=-1", r"at most one size \* or -1"),
        ("data=2", r"multiply to 8, as there are 8 devices; got data=2, which is 2"),
        ("data=4,tensor=3", r"which is 12; tensor=\* takes what is there"),
        ("data=*,tensor=3", r"a divisor of 8, .*; got data=\*,tensor=3, which is 3"),
        run=lambda text: read_mesh(text).fit(8),
    )
    assert_refused((lambda: read_mesh("data=4").fit(1), r"there are 1 device; .* set JAX_NUM_CPU_DEVICES=4"))


def test_a_mesh_divides_the_model_and_the_batch():
    task = tasks.Copy(model=settings.Sizes(d_model=24, num_heads=6, d_ff=40))
    MeshSpec(data=16, fsdp=8, tensor=2, sequence=7).demand_divides(task)
    assert_refused(
        ({"data": 3}, "batch_size=128; choose batch_size 126 or 129"),
        ({"fsdp": 256}, r"fsdp = 256 divides, .* choose batch_size 256, or"),
        ({"tensor": 4}, "divide num_heads=6, got tensor=4; it can be 1, 2, 3, 6"),
        ({"tensor": 3}, "divide d_ff=40, got tensor=3"),
        ({"expert": 3}, r"data \* fsdp \* expert = 3 divides"),
        ({"expert": 2}, "expert=1 for a model without num_experts, got expert=2; data or fsdp divide rows"),
        run=lambda sizes: MeshSpec(**sizes).demand_divides(task),
    )
    for name in ("shared_width", "delta_heads", "delta_key_heads"):
        sizes = {"num_experts": 2, "mixers": ("gated_delta",), "delta_heads": 6, name: 3}
        odd = tasks.Text(model=settings.DecoderSizes(**sizes))
        with pytest.raises(ValueError, match=f"divide {name}=3, got tensor=2"):
            MeshSpec(tensor=2).demand_divides(odd)
    with pytest.raises(ValueError, match="expert to divide num_experts=2, got expert=4; it can be 1, 2"):
        MeshSpec(expert=4).demand_divides(odd)


def test_arrays_are_divided_by_rule():
    """Two devices along "tensor", three along "fsdp", five along "expert"."""
    for path, shape, kept, used in (
        ("params/blocks/0/attention/query_projection/kernel", (24, 20), ("fsdp", "tensor"), (None, "tensor")),
        ("optimizer/1/0/mu/blocks/0/attention/output_projection/kernel", (20, 24), ("tensor", "fsdp"), None),
        ("params/blocks/0/attention/key_projection/bias", (20,), ("tensor",), ("tensor",)),
        ("params/blocks/0/attention/expansion/kernel", (9, 8), ("fsdp", "tensor"), (None, "tensor")),
        ("params/blocks/0/norm/scale", (24,), (None,), (None,)),
        ("params/entry/table/embedding", (18, 24), ("tensor", "fsdp"), ("tensor", None)),
        ("params/entry/table/embedding", (17, 10), (None, "tensor"), (None, None)),
        ("params/entry/position_table/embedding", (9, 7), ("fsdp", None), (None, None)),
        ("params/entry/position_table/embedding", (9, 15), (None, "fsdp"), (None, None)),
        ("params/widen/kernel", (7, 12), (None, ("tensor", "fsdp")), (None, "tensor")),
        ("params/branch/widen/kernels", (5, 9, 4), ("expert", "fsdp", "tensor"), ("expert", None, "tensor")),
        ("params/feed_forward/widen/biases", (9, 4), ("fsdp", "tensor"), (None, "tensor")),
        ("params/blocks/0/attention/sinks", (4,), ("tensor",), ("tensor",)),
        ("optimizer/1/0/count", (), (), ()),
    ):
        sizes = {"data": 5, "fsdp": 3, "tensor": 2, "sequence": 7, "expert": 5}
        assert tuple(divide_array(path, shape, sizes)) == kept
        if used is not None:
            assert tuple(divide_array(path, shape, sizes, in_use=True)) == used
        assert not any(divide_array(path, shape, {}))


def test_flags_come_before_the_environment():
    assert find_membership(None, None, None, {}) is find_membership("a:1", 1, 0, {}) is None
    # A batch script of Slurm, before it starts steps, and one task in a step.
    assert find_membership(None, None, None, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    step = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert find_membership(None, None, None, step) is None
    told = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    found = find_membership(None, None, None, told)
    assert (found.coordinator, found.count, found.index) == ("a:1", 3, 2)
    found = find_membership("b:2", 5, 4, told)
    assert (found.coordinator, found.count, found.index) == ("b:2", 5, 4)
    step = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    assert str(find_membership(None, None, None, step)) == "process 3 of 4"
    mpi = {"OMPI_MCA_orte_hnp_uri": "0.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert find_membership(None, None, None, mpi | {"OMPI_COMM_WORLD_RANK": "1"}).index == 1
    assert str(find_membership("auto", None, None, {})) == "this process"


def test_an_incomplete_membership_is_refused():
    assert_refused(
        (("a:1", None, None, {}), r"still needed: processes= .*, process= \(or JAX_PROCESS_ID\)"),
        ((None, 2, 1, {}), r"still needed: coordinator= \(or JAX_COORDINATOR_ADDRESS\)$"),
        (("a:1", 0, 0, {}), "processes: expected at least 1, got 0"),
        (("a", 2, 0, {}), "expected HOST:PORT of process 0, .*, or auto; got 'a'"),
        ((None, None, None, {"JAX_NUM_PROCESSES": "two"}), "JAX_NUM_PROCESSES: expected a number, got 'two'"),
        run=lambda arguments: find_membership(*arguments),
    )


def test_a_run_remembers_its_mesh_and_goes_on_on_another(begun, tmp_path):
    path = shutil.copytree(begun, tmp_path / "run") / "config.json"
    before = json.loads(path.read_text())
    assert before["mesh"] is None
    for layout in ({"mesh": "data=2", "outer": None}, {"mesh": "data=2", "outer": "data=4"}):
        run = runs.open_run(tmp_path / "run", tiny_copy(), **layout)
        assert (run.start.step, str(layout["outer"]) in run.describe({})) == (1, bool(layout["outer"]))
        run.begin({})
        assert json.loads(path.read_text()) == before | layout
    del before["mesh"], before["outer"]  # as an older version wrote it
    path.write_text(json.dumps(before))
    runs.open_run(tmp_path / "run", tiny_copy()).begin({})
    assert json.loads(path.read_text()) == before


@pytest.mark.processes
def test_copying_over_a_mesh_is_copying_on_one_device():
    """With dropout, batches in parts and an average; 9 positions, which do not divide."""
    options = "accumulate_steps=2, ema_decay=0.5, dropout_rate=0.25"
    check(f"check_losses(copy(8, {options}), 'data=2,fsdp=2,tensor=2', 'fsdp=2,sequence=2,tensor=2')")


@pytest.mark.processes
def test_a_language_is_learned_over_a_mesh_as_on_one_device():
    check("check_losses(text(22), 'data=2,fsdp=2,sequence=2')")
    experts = "num_experts=8, experts_per_token=2, expert_width=16, router_kind='sigmoid'"
    check(f"check_losses(text(22, {experts}), 'fsdp=2,expert=2,tensor=2')")


@pytest.mark.processes
def test_a_run_goes_on_over_another_mesh():
    check("check_resumed(copy(7), 'data=2,fsdp=4', 'fsdp=2,tensor=4', None)")


@pytest.mark.processes
def test_devices_make_their_own_rows_alone():
    check("check_own_rows(copy(7), 48)\ncheck_fetched_rows(text(22), 48)")
