"""`regard explain`: the dispatcher's answer for shapes alone."""

from regard.cli.commands import Explain
from regard.cli.console import Console, UsageError


def run_explaining(command: Explain, console: Console) -> int:
    """Prints which backend serves a call and why; exit code 1 when none does."""
    shape = _parse_shape("--shape", command.shape)
    key_shape = _parse_shape("--key-shape", command.key_shape) if command.key_shape else shape
    value_shape = _parse_shape("--value-shape", command.value_shape) if command.value_shape else key_shape

    import jax

    from regard import explain, masks

    query, key, value = (jax.ShapeDtypeStruct(s, command.dtype) for s in (shape, key_shape, value_shape))
    try:
        mask = masks.parse(command.mask) if command.mask else None
        with jax.enable_x64(command.dtype == "float64"):
            report = explain(
                query, key, value, mask=mask, query_offset=command.query_offset, backend=command.backend
            )
        console.say(str(report))
        if command.picture and mask is not None:
            console.say(mask.picture(shape[-2], key_shape[-2], query_offset=command.query_offset))
    except NotImplementedError as error:
        console.fail(str(error))
        return 1
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return 0


def _parse_shape(flag: str, text: str) -> tuple[int, ...]:
    """A shape such as 1,8,4096,64."""
    try:
        shape = tuple(int(word) for word in text.strip(" ()").split(",") if word.strip())
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 0:
        raise UsageError(f"{flag} must be whole numbers such as 1,8,4096,64, at least two, got {text!r}")
    return shape
