"""`regard generate`: text from a trained model, shown while it is made."""

import time
from collections.abc import Iterator
from typing import Any

import jax

from regard.cli.commands import Generate
from regard.cli.console import Console, UsageError, count_things, enough_memory, expected_errors
from regard.cli.spelling import Ending
from regard.cli.text_models import TextModel, open_text_model
from regard.models import Sampling, beam_search, stream
from regard.models.sampling import row_keys
from regard.training.runs import SEEDS

TEMPERATURE = 0.8
MOST_TOKENS = 2**30  # int32 counts them, and the prompt's
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def run_generating(command: Generate, console: Console) -> int:
    """Write after each prompt; the text goes to standard output, remarks about it to standard error."""
    drawing: dict[str, Any] = {"temperature": TEMPERATURE} | _check(command)
    with expected_errors(), enough_memory("this", "give fewer --max-tokens, or --beams"):
        text_model = open_text_model(command.source)
        prompts = [text_model.encode(text) for text in command.prompt]
        if command.beams is not None:
            _search(command, console, text_model, prompts)
            return 0
        sampling = Sampling(**drawing)
        # One after the other, as people read; each draws by its number.
        keys = row_keys(jax.random.key(command.seed or 0), len(prompts))
        for number, prompt in enumerate(prompts):
            options = {"sampling": sampling, "rng": keys[number : number + 1], **_limit(command, text_model)}
            tokens = stream(text_model.model, [prompt], **options)
            _write(command, console, text_model, number, prompt, tokens)
    return 0


def _limit(command: Generate, text_model: TextModel) -> dict[str, Any]:
    """Return the options that begin and end a text."""
    ends = {"stop_tokens": text_model.stop_tokens, "start_token": text_model.start_token}
    return {"max_tokens": command.max_tokens, "cache_dtype": command.cache_dtype, **ends}


def _check(command: Generate) -> dict[str, Any]:
    """Raise for flags that do not go together; return those about drawing that were given."""
    if not command.prompt:
        raise UsageError("generate needs a text to begin with, such as: --prompt 'Once upon a time'")
    if not 1 <= command.max_tokens <= MOST_TOKENS:
        raise UsageError(f"--max-tokens must be from 1 to {MOST_TOKENS}, got {command.max_tokens}")
    if command.seed is not None and command.seed not in SEEDS:
        raise UsageError(f"--seed must be from -2**63 to 2**63 - 1, got {command.seed}")
    if not all(command.stop):
        raise UsageError("--stop must be a text, got an empty one")
    sampling = {name: getattr(command, name) for name in SAMPLING_FLAGS if getattr(command, name) is not None}
    drawing = [*sampling, *["seed"] * (command.seed is not None)]
    if command.beams is not None and drawing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in drawing)
        raise UsageError(f"--beams searches and draws nothing; leave out {flags}")
    if command.beams is not None and command.beams < 1:
        raise UsageError(f"--beams must be at least 1, got {command.beams}")
    if command.temperature == 0 and command.seed is not None:
        raise UsageError("--temperature 0 draws nothing; leave out --seed")
    return sampling


def _write(
    command: Generate,
    console: Console,
    text_model: TextModel,
    number: int,
    prompt: list[int],
    rows: Iterator[list[list[int]]],
) -> None:
    """Show one text while it is made, and how fast that was."""
    ending, begun = Ending(command.stop), time.perf_counter()
    made: list[int] = []
    times: list[float] = []

    def take_tokens() -> Iterator[int]:
        for (row,) in rows:
            made.extend(row)
            times.extend(time.perf_counter() for _ in row)
            yield from (token for token in row if token not in text_model.stop_tokens)

    console.write(command.prompt[number] if text_model.continues else "")
    text = ""
    for piece in ending.cut(text_model.spell(prompt, take_tokens())):
        text += piece
        console.write(piece)
        if piece:
            console.emit("piece", prompt=number, text=piece)
    console.write("\n")
    reason = _name_end(made, ending, text_model, command)
    facts: dict[str, Any] = {"given": command.prompt[number], "text": text, "ids": made, "reason": reason}
    facts |= {"tokens": len(made), "seconds": time.perf_counter() - begun}
    shown = f"{count_things(len(made), 'token')}, none"
    if times:
        shown = f"{count_things(len(made), 'token')}, the first after {times[0] - begun:.2f} s with compiling"
    # The first tokens wait for programs to be compiled.
    if len(times) > 2 and times[-1] > times[1]:
        rate = facts["tokens_per_second"] = (len(times) - 2) / (times[-1] - times[1])
        shown += f", then {rate:.1f} tokens per second"
    console.emit("text", prompt=number, **facts)
    console.remark(f"{shown}; ended by {reason}")


def _name_end(made: list[int], ending: Ending, text_model: TextModel, command: Generate) -> str:
    if ending.is_reached:
        return "--stop"
    if made and made[-1] in text_model.stop_tokens:
        return "the model"
    return "--max-tokens" if len(made) == command.max_tokens else "numbers that are not finite"


def _search(command: Generate, console: Console, text_model: TextModel, prompts: list[list[int]]) -> None:
    """Show the likeliest text for each prompt; JSON lines hold all that were found."""
    begun = time.perf_counter()
    options = _limit(command, text_model)
    beams = beam_search(text_model.model, prompts, num_beams=command.beams or 1, **options)
    for number, (texts, scores) in enumerate(zip(beams.rows(), beams.scores.tolist(), strict=True)):
        spelled = []
        for tokens, score in zip(texts, scores, strict=False):
            text_tokens = [token for token in tokens if token not in text_model.stop_tokens]
            text = "".join(Ending(command.stop).cut(text_model.spell(prompts[number], text_tokens)))
            spelled.append({"text": text, "ids": tokens, "score": score})
        prompt = command.prompt[number]
        console.emit("beams", prompt=number, given=prompt, texts=spelled)
        best = spelled[0]["text"] if spelled else ""
        console.write(f"{prompt if text_model.continues else ''}{best}\n")
        if not spelled:
            console.remark(f"prompt {number}: nothing was found, as numbers are not finite")
    console.remark(f"{command.beams} beams, {time.perf_counter() - begun:.2f} s with compiling")
