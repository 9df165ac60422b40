"""The documentation site: `make docs` builds it into build/docs, and every cell of every page runs."""

import hashlib
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_extensions"))

# What the cells compute is to be the same on every machine.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PYTHONHASHSEED"] = "0"
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

# Programs are compiled once, for all pages and for the tests.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / "build" / "compilation-cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# No profile of the reader's own, and no word from the kernel about how it talks to this process.
profile = ROOT / "build" / "docs-ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 'ERROR'\n")
# `!command` in a cell prints as into a file, where the kernel would play a terminal; and it must succeed.
# Programs of several devices are compiled anew: from a file, they may wait for one another for ever.
(profile / "startup").mkdir(exist_ok=True)
(profile / "startup" / "commands.py").write_text(
    """
import os, subprocess

def run_command(line):
    colours = ("FORCE_COLOR", "CLICOLOR_FORCE")
    plain = {name: value for name, value in os.environ.items() if name not in colours}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(line, shell=True, text=True, env=plain, **pipes)
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"{line} ended with {done.returncode}")

def compile_anew(info):
    if "jax_num_cpu_devices" in info.raw_cell:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

get_ipython().system = run_command
get_ipython().events.register("pre_run_cell", compile_anew)
"""
)
os.environ["IPYTHONDIR"] = str(profile.parent)

project = "Regard"
author = "the Regard authors"
copyright = "the Regard authors, Apache-2.0"
version = release = importlib.metadata.version("regard")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "links",
    "mathml",
    "notebooks",
    "public_names",
    "pictures",
    "papers",
]
exclude_patterns = ["_extensions", "**/README.md"]
source_suffix = {".md": "myst-nb"}
smartquotes_action = "D"  # dashes; quotes are mostly code here
highlight_language = "none"  # what is code says so
nitpicky = False  # tests/house/test_site.py walks every link of the built pages instead
default_role = "literal"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline", "fieldlist"]
myst_heading_anchors = 4


def name_cache() -> Path:
    """A folder of executed cells that belongs to this state of the package and its requirements."""
    seen = hashlib.sha256(sys.version.encode())
    for path in sorted((ROOT / "src").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            seen.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    for package in ("jax", "jaxlib", "flax", "optax", "numpy", "matplotlib"):
        seen.update(importlib.metadata.version(package).encode())
    cache = ROOT / "build" / "docs-cells" / seen.hexdigest()[:12]
    for other in cache.parent.glob("*"):
        if other != cache:
            shutil.rmtree(other, ignore_errors=True)
    return cache


nb_execution_mode = "cache"
nb_execution_cache_path = str(name_cache())
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # nothing is fetched from elsewhere

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False  # it reads the source, where `attend`'s options are one name
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = f"Regard {release}"
html_logo = "_static/regard.svg"
html_favicon = "_static/regard.svg"
html_static_path = ["_static"]
html_css_files = ["regard.css"]
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_math_renderer = "mathml"
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
    "navbar_persistent": [],
    "logo": {"text": "Regard", "alt_text": "Regard"},
    "extra_footer": f"Regard {release}; cells ran with jax {importlib.metadata.version('jax')}",
}
