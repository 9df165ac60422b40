"""`regard generate`: text from a trained model, shown while it is made."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from regard.cli.commands import Generate
from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.spelling import Ending
from regard.cli.text_models import TextModel, open_text_model
from regard.models import Sampling, beam_search, stream
from regard.models.sampling import row_keys

TEMPERATURE = 0.8
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass
class Pace:
    """The times at which tokens came: the first ones wait for programs to be compiled."""

    begun: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)

    def count(self) -> None:
        """Count a token that is here."""
        self.times.append(time.perf_counter())

    def describe(self) -> dict[str, float]:
        """Return tokens, seconds, and the rate after the second token, when nothing is compiled any more."""
        found = {"tokens": len(self.times), "seconds": time.perf_counter() - self.begun}
        if len(self.times) > 2 and self.times[-1] > self.times[1]:
            found["tokens_per_second"] = (len(self.times) - 2) / (self.times[-1] - self.times[1])
        return found


def run_generating(command: Generate, console: Console) -> int:
    """Write after each prompt; the text goes to standard output, remarks about it to standard error."""
    _check(command)
    with expected_errors():
        text_model = open_text_model(command.source)
        prompts = [text_model.encode(text) for text in command.prompt]
        if command.beams is not None:
            _search(command, console, text_model, prompts)
            return 0
        for number, tokens in enumerate(_streams(command, text_model, prompts)):
            _write(command, console, text_model, number, prompts[number], tokens)
    return 0


def _check(command: Generate) -> None:
    """Raise for flags that do not go together."""
    if not command.prompt:
        raise UsageError("generate needs a text to begin with, such as: --prompt 'Once upon a time'")
    if command.max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1, got {command.max_tokens}")
    if not all(command.stop):
        raise UsageError("--stop must be a text, got an empty one")
    drawn = [f"--{name.replace('_', '-')}" for name in SAMPLING_FLAGS if getattr(command, name) is not None]
    if command.beams is not None and drawn:
        raise UsageError(f"--beams searches and draws nothing; leave out {', '.join(drawn)}")
    if command.beams is not None and command.beams < 1:
        raise UsageError(f"--beams must be at least 1, got {command.beams}")


def _streams(
    command: Generate, text_model: TextModel, prompts: list[list[int]]
) -> Iterator[Iterator[list[list[int]]]]:
    """Yield a stream of tokens per prompt, one after the other, as people read; each draws by its number."""
    temperature = TEMPERATURE if command.temperature is None else command.temperature
    sampling = Sampling(
        temperature=temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        min_p=command.min_p,
        repetition_penalty=command.repetition_penalty,
    )
    keys = row_keys(jax.random.key(command.seed), len(prompts))
    for number, prompt in enumerate(prompts):
        yield stream(
            text_model.model,
            [prompt],
            max_tokens=command.max_tokens,
            sampling=sampling,
            stop_tokens=text_model.stop_tokens,
            start_token=text_model.start_token,
            rng=keys[number : number + 1],
        )


def _write(
    command: Generate,
    console: Console,
    text_model: TextModel,
    number: int,
    prompt: list[int],
    tokens: Iterator[list[list[int]]],
) -> None:
    """Show one text while it is made, and how fast that was."""
    spelling, ending, pace = text_model.spell(prompt), Ending(command.stop), Pace()
    made: list[int] = []
    text = ""

    def show(piece: str) -> None:
        nonlocal text
        text += piece
        console.write(piece)
        if piece:
            console.emit("piece", prompt=number, text=piece)

    console.write(command.prompt[number] if text_model.continues else "")
    for (row,) in tokens:
        for token in row:
            made.append(token)
            pace.count()
            if token not in text_model.stop_tokens:
                show(ending.push(spelling.push([token])))
        if ending.is_reached:
            break
    show(ending.push(spelling.finish()))
    show(ending.finish())
    console.write("\n")
    reason = _name_end(made, ending, text_model, command)
    facts: dict[str, Any] = pace.describe()
    console.emit(
        "text", prompt=number, given=command.prompt[number], text=text, ids=made, reason=reason, **facts
    )
    rate = facts.get("tokens_per_second")
    shown = "" if rate is None else f", then {rate:.1f} tokens per second"
    first = f"the first after {pace.times[0] - pace.begun:.2f} s with compiling" if pace.times else "none"
    console.remark(f"{facts['tokens']} tokens, {first}{shown}; ended by {reason}")


def _name_end(made: list[int], ending: Ending, text_model: TextModel, command: Generate) -> str:
    """Name the reason for which a text ended."""
    if ending.is_reached:
        return "--stop"
    if made and made[-1] in text_model.stop_tokens:
        return "the model"
    return "--max-tokens" if len(made) == command.max_tokens else "numbers that are not finite"


def _search(command: Generate, console: Console, text_model: TextModel, prompts: list[list[int]]) -> None:
    """Show the likeliest text for each prompt; JSON lines hold all that were found."""
    begun = time.perf_counter()
    found = beam_search(
        text_model.model,
        prompts,
        num_beams=command.beams or 1,
        max_tokens=command.max_tokens,
        stop_tokens=text_model.stop_tokens,
        start_token=text_model.start_token,
    )
    scores = found.scores.tolist()
    for number, texts in enumerate(found.rows()):
        told = []
        for tokens in texts:
            spelling, ending = text_model.spell(prompts[number]), Ending(command.stop)
            kept = [token for token in tokens if token not in text_model.stop_tokens]
            text = ending.push(spelling.push(kept)) + ending.push(spelling.finish()) + ending.finish()
            told.append({"text": text, "ids": tokens, "score": scores[number][len(told)]})
        given = command.prompt[number]
        console.emit("beams", prompt=number, given=given, texts=told)
        best = told[0]["text"] if told else ""
        console.write(f"{given if text_model.continues else ''}{best}\n")
        if not told:
            console.remark(f"prompt {number}: nothing was found, as numbers are not finite")
    console.remark(f"{command.beams} beams, {time.perf_counter() - begun:.2f} s with compiling")
