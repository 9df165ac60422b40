"""`regard generate`: what goes to which stream, flags that do not fit, and the models that it opens."""

import json

import numpy as np
import pytest
from flax import nnx

from command_runs import run_command
from layer_oracle import build_drawn
from regard.cli import generating, text_models
from regard.cli.console import Console
from regard.cli.spelling import spell_bytes
from regard.interop import huggingface
from regard.models import Decoder, EncoderDecoder, TransformerConfig, generate
from small_runs import begin, tiny_copy
from test_spelling import byte_pairs

V, MARK = 131, 130


def configure(**options):
    return TransformerConfig(d_model=12, num_heads=3, d_ff=13, num_layers=1, vocab_size=V, **options)


def spell(token):
    return b"" if token == MARK else bytes([token % 128])


def offer(monkeypatch, model, start_token=None):
    """What every directory holds from now on."""
    encode = lambda text: [MARK, *text.encode()]
    spelling = {"encode": encode, "spell": lambda _, tokens: spell_bytes(spell, tokens)}
    options = {"title": "a test", "stop_tokens": (MARK,), "start_token": start_token}
    found = text_models.TextModel(model=model, **spelling, **options)
    monkeypatch.setattr(generating, "open_text_model", lambda directory: found)


@pytest.fixture(scope="module")
def model():
    made = build_drawn(Decoder, configure())
    made.trunk.embedding.entry.table.embedding[...] *= 4.0
    return made


@pytest.fixture
def text_model(model, monkeypatch):
    offer(monkeypatch, model)


def write(capsys, *flags, code=0):
    return run_command(capsys, "generate", "somewhere", "--max-tokens", 9, *flags, code=code)


def spell_all(tokens):
    return b"".join(map(spell, tokens)).decode("utf-8", errors="replace")


@pytest.mark.slow
def test_text_goes_to_one_stream_and_remarks_to_the_other(text_model, capsys):
    done = write(capsys, "--prompt", "ab", "--temperature", 0)
    assert done.out.startswith("ab")
    assert "9 tokens, the first after " in done.err
    assert "tokens per second; ended by --max-tokens" in done.err
    assert write(capsys, "--prompt", "ab", "--temperature", 0, "--quiet") == (done.out, "")


def test_a_seed_decides_and_prompts_draw_apart(text_model, capsys):
    words = ("--prompt", "ab", "--prompt", "ab", "--temperature", 2, "--quiet", "--seed")
    texts = [write(capsys, *words, seed).out for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][: len(texts[0]) // 2] != texts[0][len(texts[0]) // 2 :]


@pytest.mark.slow
def test_json_lines_hold_pieces_and_facts(model, text_model, capsys):
    words = ("--prompt", "ab", "--prompt", "cd", "--temperature", 0, "--json")
    lines = [json.loads(line) for line in write(capsys, *words).out.splitlines()]
    ends = [line for line in lines if line["event"] == "text"]
    for number, (end, given) in enumerate(zip(ends, ["ab", "cd"], strict=True)):
        pieces = [line["text"] for line in lines if line["event"] == "piece" and line["prompt"] == number]
        assert "".join(pieces) == end["text"] == spell_all(end["ids"])
        assert (end["given"], end["tokens"], end["reason"]) == (given, 9, "--max-tokens")
    prompts = [[MARK, *given.encode()] for given in ("ab", "cd")]
    assert [end["ids"] for end in ends] == generate(model, prompts, max_tokens=9).rows()
    word = ends[0]["text"][3:5]
    ended = [json.loads(line) for line in write(capsys, *words, "--stop", word).out.splitlines()]
    (end,) = (line for line in ended if line["event"] == "text" and line["given"] == "ab")
    assert (end["text"], end["reason"]) == (ends[0]["text"][: ends[0]["text"].index(word)], "--stop")


@pytest.mark.slow
def test_a_broken_model_says_so(model, monkeypatch, capsys):
    broken = nnx.clone(model)
    broken.head.kernel[...] = broken.head.kernel[...] * np.nan
    offer(monkeypatch, broken)
    told = write(capsys, "--prompt", "ab", "--temperature", 0).err
    assert "0 tokens, none; ended by numbers that are not finite" in told
    told = write(capsys, "--prompt", "ab", "--beams", 3).err
    assert "nothing was found, as numbers are not finite" in told


def test_beams_show_the_best_and_json_all(text_model, capsys):
    shown = write(capsys, "--prompt", "ab", "--beams", 3)
    (line,) = write(capsys, "--prompt", "ab", "--beams", 3, "--json").out.splitlines()
    texts = json.loads(line)["texts"]
    assert len(texts) == 3
    assert [one["score"] for one in texts] == sorted((one["score"] for one in texts), reverse=True)
    assert shown.out == "ab" + texts[0]["text"] + "\n"
    assert "3 beams" in shown.err


def test_an_answer_stands_without_its_prompt(monkeypatch, capsys):
    model = build_drawn(EncoderDecoder, configure())
    offer(monkeypatch, model, start_token=5)
    (tokens,) = generate(model, [[MARK, 97, 98]], max_tokens=9, start_token=5, stop_tokens=(MARK,)).rows()
    assert write(capsys, "--prompt", "ab", "--temperature", 0).out == spell_all(tokens) + "\n"


def test_flags_that_do_not_fit_are_refused(text_model, capsys):
    for flags, message in (
        ("", "generate needs a text to begin with, such as: --prompt"),
        ("--prompt a --beams 2 --top-k 3 --seed 0", "searches and draws nothing; leave out --top-k, --seed"),
        (f"--prompt a --seed {2**63}", "--seed must be from -2**63 to 2**63 - 1, got 9223372036"),
        ("--prompt a --temperature 0 --min-p 0.1", "expected a temperature above 0"),
        ("--prompt a --temperature 0 --seed 3", "--temperature 0 draws nothing; leave out --seed"),
        ("--prompt é", "prompts: expected tokens in 0..130"),
    ):
        done = write(capsys, *flags.split(), code=2)
        assert message in " ".join(done.err.split())
        assert done.out == ""


def test_directories_without_a_writer_are_refused(tmp_path, capsys):
    begin(tmp_path / "copy", tiny_copy())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text("[" * 100_000)
    for name, message in (
        ("nothing", "has no config.json; give a run of `regard train text`"),
        ("deep", "config.json is damaged or not Regard's (RecursionError"),
        ("copy", "is a run of copy, which writes no text"),
    ):
        told = run_command(capsys, "generate", tmp_path / name, "--prompt", "a", code=2).err
        assert message in " ".join(told.split())


def test_control_characters_are_shown_on_terminals(capsys, monkeypatch):
    for is_terminal, shown in ((True, "a\u241b[2J\u240db\tc\n\ufffd"), (False, "a\x1b[2J\rb\tc\n\x9b")):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        Console().write("a\x1b[2J\rb\tc\n\x9b")
        assert capsys.readouterr().out == shown


PLAIN = {"vocab_size": 263, "d_model": 12, "num_heads": 2, "d_ff": 13, "num_layers": 1, "norm_kind": "rms"}
PLAIN |= dict.fromkeys(("attention_bias", "feed_forward_bias", "head_bias", "scale_embedding"), False)


@pytest.mark.slow
def test_a_hugging_face_folder_writes(tmp_path, capsys):
    llama = TransformerConfig(**PLAIN, positions="rotary", gated=True, activation="silu")
    model = build_drawn(Decoder, llama)
    folder = huggingface.save(model, tmp_path / "llama", "llama", settings={"eos_token_id": 3})
    words = ["generate", folder, "--prompt", "plain"]
    assert "has no tokenizer" in run_command(capsys, *words, code=2).err
    byte_pairs().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert run_command(capsys, *words, "--max-tokens", 5, "--temperature", 0).out.startswith("plain")
    text_model = text_models.open_text_model(folder)
    assert text_model.stop_tokens == (5, 7)
    with pytest.raises(ValueError, match="has no tokens, and the model none to begin with"):
        text_model.encode("")
    shared = {"tied_output": True, "shared_embedding": True, "output_scale": 12**-0.5, "attention_scale": 1.0}
    t5 = TransformerConfig(**PLAIN, **shared, positions="relative", activation="relu")
    settings = {"eos_token_id": 1, "decoder_start_token_id": 0}
    folder = huggingface.save(build_drawn(EncoderDecoder, t5), tmp_path / "t5", "t5", settings=settings)
    byte_pairs().save(str(folder / "tokenizer.json"))
    text_model = text_models.open_text_model(folder)
    assert (text_model.start_token, text_model.stop_tokens, text_model.continues) == (0, (1,), False)
