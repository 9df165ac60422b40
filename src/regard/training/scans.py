"""The digits' data: scikit-learn's 1,797 real 8x8 scans, their split, their distortion, their patches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

BRIGHTEST = 16.0  # scikit-learn stores counts of dark pixels in 4x4 cells, 0 to 16
REACH = (0.15, 0.15, 0.1, 0.1, 0.5, 0.5)  # turn, shear (radians), stretch (2 axes), shift (pixels, 2 axes)


def load_scans() -> tuple[Float[np.ndarray, "N 8 8"], Int[np.ndarray, " N"]]:
    """Reads the scans that scikit-learn ships (no download): pixels in [0, 1] and labels 0 to 9.

    Raises:
        ImportError: when scikit-learn is not installed, with the command that installs it.

    Reference:
        E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
        Repository, 1998 (its test set).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'regard[train]'") from error
    digits: Any = load_digits()
    return (digits.images / BRIGHTEST).astype(np.float32), digits.target.astype(np.int32)


def split_stratified(labels: Int[np.ndarray, " N"], fraction: float, seed: int) -> Bool[np.ndarray, " N"]:
    """Chooses the held-out examples: the same fraction of every class, at random.

    Args:
        labels: one class per example.
        fraction: part of each class to hold out, in (0, 1), rounded to whole examples.
        seed: fixes the choice.

    Returns:
        True where an example is held out.
    """
    generator = np.random.default_rng(seed)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out[generator.permutation(members)[: round(fraction * len(members))]] = True
    return held_out


def distort_scans(rng: jax.Array, scans: Float[Array, "B R C"], strength: float) -> Float[Array, "B R C"]:
    """Turns, shears, stretches and moves each scan a little, at random; what enters is background, 0.

    A pixel at x (from the centre) shows the scan at A x + b, read bilinearly, with A near the identity.

    Args:
        rng: random key.
        scans: pixels.
        strength: 1 allows up to 0.15 radians of turn and of shear, a tenth of stretch and half a pixel of
            shift; 0 leaves the scans as they are.
    """
    draws = jax.random.uniform(rng, (scans.shape[0], 6), minval=-strength, maxval=strength)
    return jax.vmap(_distort)(scans, draws * jnp.array(REACH)[None])


def _distort(scan: Float[Array, "R C"], amounts: Float[Array, " 6"]) -> Float[Array, "R C"]:
    """One scan through an affine map about its centre."""
    turn, shear, stretch_down, stretch_across, down, across = amounts
    middle = [(size - 1) / 2 for size in scan.shape]
    y, x = jnp.meshgrid(*(jnp.arange(2 * half + 1) - half for half in middle), indexing="ij")
    rows = (1 + stretch_down) * (jnp.cos(turn) * y - jnp.sin(turn) * x) + down
    columns = (1 + stretch_across) * (jnp.sin(turn) * y + jnp.cos(turn) * x) + shear * y + across
    return jax.scipy.ndimage.map_coordinates(scan, [rows + middle[0], columns + middle[1]], order=1)


def cut_patches(scans: Float[Array, "B R C"], grid: tuple[int, int]) -> Float[Array, "B P W"]:
    """Cuts each scan into a grid of equal patches, row by row, each flattened row by row.

    Example:
        >>> cut_patches(np.arange(16.0).reshape(1, 4, 4), (2, 2))[0, 1].tolist()
        [2.0, 3.0, 6.0, 7.0]
    """
    batch, height, width = scans.shape
    rows, columns = grid
    blocks = scans.reshape(batch, rows, height // rows, columns, width // columns)
    return blocks.transpose(0, 1, 3, 2, 4).reshape(batch, rows * columns, -1)
