"""Make the pictures of the explorer that README and the site show, light and dark.

    make pretrained && python docs/images/make_explorer.py

MiniLM reads a sentence, and Chromium takes the page on the head in which "it" reads "cat" most.
"""

import os
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from regard import inspection
from regard.interop import huggingface

TEXT = "The cat sat on the mat because it was tired."
FOLDER, SIZE = Path(__file__).parent, {"width": 1320, "height": 840}


def main() -> None:
    loaded = huggingface.load(huggingface.find_minilm())
    encoding = loaded.tokenizer.encode(TEXT)
    tokens = inspection.Tokens(encoding.tokens, ids=encoding.ids, spans=encoding.offsets)
    with inspection.capture(loaded.model, tokens=tokens, title=TEXT) as trace:
        loaded.model(jnp.asarray([encoding.ids], jnp.int32))
    query, key = encoding.tokens.index("it"), encoding.tokens.index("cat")
    weights = np.stack([call.window()[:, query, key] for call in trace.calls])
    layer, head = np.unravel_index(weights.argmax(), weights.shape)
    place = f"#l={layer}&h={head}&row={query}&key={key}"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_path = trace.explore(Path(folder) / "page.html")
        chromium = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"))
        for scheme, name in (("light", "explorer.png"), ("dark", "explorer_dark.png")):
            page = chromium.new_page(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
            page.goto(f"{page_path.as_uri()}{place}")
            page.wait_for_function("window.__regard.ready.then(() => true)")
            page.wait_for_timeout(1000)
            page.screenshot(path=FOLDER / name)
            with Image.open(FOLDER / name) as picture:
                fewer = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            fewer.save(FOLDER / name, optimize=True)


if __name__ == "__main__":
    main()
