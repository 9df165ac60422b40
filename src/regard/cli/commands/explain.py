"""`regard explain`: the dispatcher's answer for shapes alone."""

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

from regard.cli.console import Console, RunFailedError, UsageError, expected_errors
from regard.cli.declaration import Command, Output, option


@dataclass(frozen=True)
class Explain(Command):
    """Say which backend would serve an attention call, why, and how much work it is; nothing is computed.

    Example: regard explain --shape 1,8,4096,64 --mask 'causal() & sliding_window(256)'
    """

    EXTRA = None
    ALIASES: ClassVar = {"query": "shape", "key": "key_shape", "value": "value_shape"}

    shape: Annotated[str, option("N,N,...")]
    """Shape of query: leading axes, heads, length, width."""
    key_shape: Annotated[str | None, option("N,N,...", "that of query")] = None
    """Shape of key."""
    value_shape: Annotated[str | None, option("N,N,...", "that of key")] = None
    """Shape of value."""
    mask: Annotated[str | None, option("EXPRESSION", "everybody to everybody")] = None
    """Who may attend to whom, such as 'causal() & sliding_window(256)'."""
    query_offset: Annotated[int | None, option("N", "0 when lengths are equal")] = None
    """Position of the first query."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Type of query, key and value."""
    backend: Annotated[str | None, option("NAME", "the best that serves")] = None
    """Ask for one backend."""
    picture: bool = False
    """Draw the mask too."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Print which backend serves a call and why; return 1 when none does."""
        shape = _parse_shape("--shape", self.shape)
        key_shape = _parse_shape("--key-shape", self.key_shape) if self.key_shape else shape
        value_shape = _parse_shape("--value-shape", self.value_shape) if self.value_shape else key_shape

        import jax

        from regard import explain, masks

        arrays = [jax.ShapeDtypeStruct(s, self.dtype) for s in (shape, key_shape, value_shape)]
        offset = self.query_offset
        try:
            with jax.enable_x64(self.dtype == "float64"), expected_errors():
                mask = masks.parse(self.mask) if self.mask else None
                report = explain(*arrays, mask=mask, query_offset=offset, backend=self.backend)
                console.say(str(report))
                computes = report.computes and str(report.computes)
                console.emit("explanation", **asdict(report) | {"computes": computes})
                if self.picture and mask is not None:
                    console.say(mask.picture(shape[-2], key_shape[-2], query_offset=offset))
        except NotImplementedError as error:
            raise RunFailedError(str(error)) from error
        return 0


def _parse_shape(flag: str, text: str) -> tuple[int, ...]:
    """Read a shape such as 1,8,4096,64, of sizes that int32 counts."""
    most = 2**31 - 1
    try:
        shape = tuple(int(word) for word in text.strip(" ()").split(",") if word.strip())
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 0 or max(shape) > most:
        wanted = f"whole numbers up to {most} such as 1,8,4096,64, at least two"
        raise UsageError(f"{flag} must be {wanted}, got {text!r}")
    return shape
