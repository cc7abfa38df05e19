"""Broken and malicious checkpoints are refused in one sentence, and none of their code runs."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint, spec_named
from tokenizers import Tokenizer as Backend

from minisgl.config import EngineConfig
from minisgl.engine.startup import load
from minisgl.errors import CheckpointError, InvalidRequestError, MinisglError, ModelNotFoundError
from minisgl.models.generation import read_generation_defaults
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.models.rope import inverse_frequencies
from minisgl.text import control_spellings
from minisgl.text.tokenizer import Tokenizer

HUGE = 10**400
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ODD_VALUES = st.recursive(
    st.sampled_from([HUGE, -HUGE, 1e308, 1e-320, 2**31, 2**63, 0, 1, -1, "", "\ud800", True, None])
    | st.integers()
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
    },
}
SAMPLING = ("eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with everything that a checkpoint has."""
    made = make_checkpoint(spec_named("llama"), tmp_path / "model")
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, made)
    return made


def load_all(folder: Path) -> None:
    config = EngineConfig(model=str(folder), device="cpu", num_pages=20, page_size=16)
    load(config).runner.close()


# Hypothesis runs its examples in one folder, which each writes anew.
many = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("spec", ["llama", "qwen3", "moe"])
def test_any_value_of_a_config_field_is_read_or_refused_in_a_sentence(
    spec: str, tmp_path: Path
) -> None:
    file = make_checkpoint(spec_named(spec), tmp_path) / "config.json"
    fields = json.loads(file.read_text())
    names = [*fields, "rope_theta", "sliding_window", "use_sliding_window", "layer_types"]

    @many
    @given(name=st.sampled_from(names), value=ODD_VALUES)
    def read(name: str, value: object) -> None:
        read_or_refuse(file, fields | {name: value})

    read()


@pytest.mark.parametrize("rope_type", ROPES)
def test_any_value_of_a_rope_field_is_read_or_refused_in_a_sentence(
    rope_type: str, tmp_path: Path
) -> None:
    file = make_checkpoint(spec_named("llama"), tmp_path) / "config.json"
    fields = json.loads(file.read_text())
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}

    @many
    @given(
        name=st.sampled_from(list(rope)),
        value=st.sampled_from([1.0, 4.0, -4.0, 1.0000001, HUGE, 1e308, 1e30, 1e-30, 0])
        | ODD_VALUES,
    )
    def read(name: str, value: object) -> None:
        read_or_refuse(file, fields | {"rope_parameters": rope | {name: value}})

    read()


def read_or_refuse(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(json.dumps(fields))
    try:
        config = read_model_config(file.parent)
    except MinisglError as error:
        assert str(error)
        return
    assert dataclasses.asdict(config.facts())
    inverse_frequencies(config.rope, min(config.head_dim, 128))


@many
@given(values=st.dictionaries(st.sampled_from((*SAMPLING, "do_sample")), ODD_VALUES))
def test_any_sampling_default_is_read_or_refused_in_a_sentence(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "generation_config.json").write_text(json.dumps(values))
    try:
        read_generation_defaults(folder).sampling(max_tokens=1)
    except MinisglError as error:
        assert str(error)


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", [2**31 - 8, HUGE], ids=["large", "huge"])
def test_a_model_of_any_size_is_refused_in_a_sentence(folder: Path, name: str, value: int) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    # Linux may promise any amount of memory, and then the weights have another shape.
    reasons = "do not fit into the memory|not a whole number from|the config asks for"
    with pytest.raises(MinisglError, match=reasons):
        load_all(folder)


CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "no UTF-8": b"\xff\xfe{}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a long number": b"1" * 100_000,
    "a list": b"[]",
    "zeros": bytes(100),
    "a huge header": b"\xff" * 8 + b"{}",
    "a header of other types": (44).to_bytes(8, "little")
    + b'{"a":{"dtype":7,"shape":{},"data_offsets":1}}',
    "tensors beyond the end": (62).to_bytes(8, "little")
    + b'{"lm_head.weight":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("content", CONTENTS)
def test_any_file_that_cannot_be_read_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(CONTENTS[content])
    with pytest.raises(CheckpointError, match=name):
        load_all(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", CONTENTS)
def test_an_unreadable_tokenizer_is_reported_as_such(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(CONTENTS[content])
    with pytest.raises(CheckpointError, match=r"tokenizer.* cannot be read: \S"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_in_place_of_a_file_counts_as_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(MinisglError, match=r"has no config\.json|has no tokenizer|has no weights"):
        load_all(folder)


# -- code -----------------------------------------------------------------------------------------


class Payload:
    """Pickled, it makes a file when it is read again."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._marker), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_weights_are_never_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(
        (CheckpointError, ModelNotFoundError), match=r"minisgl reads safetensors|cannot be read"
    ):
        load_all(folder)
    assert not marker.exists()


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "Evil"])
def test_remote_code_is_neither_run_nor_prompted_for(
    folder: Path,
    tmp_path: Path,
    tokenizer_class: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr("builtins.input", ask)
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map: dict[str, Any] = dict.fromkeys(names, "evil.Evil")
    auto_map["AutoTokenizer"] = ["evil.Evil", None]
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text()) | {"auto_map": auto_map}
        if name == "tokenizer_config.json":
            fields["tokenizer_class"] = tokenizer_class
        (folder / name).write_text(json.dumps(fields))
    if tokenizer_class == "Evil":
        with pytest.raises(CheckpointError, match="code from a checkpoint is not run"):
            load_all(folder)
    else:
        load_all(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen(COMMAND).read() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% set x = messages.__class__.__base__ %}{{ x.__subclasses__() }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(
    folder: Path, tmp_path: Path, template: str
) -> None:
    marker = tmp_path / "marker"
    command = f"'touch {marker}'"
    (folder / "chat_template.jinja").write_text(template.replace("COMMAND", command))
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(InvalidRequestError, match="chat template refuses them"):
        tokenizer.chat([{"role": "user", "content": "Hello"}])
    assert not marker.exists()


def test_a_chat_template_that_fails_without_a_word_is_refused_by_the_kind_of_its_error(
    folder: Path,
) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('') }}")
    with pytest.raises(InvalidRequestError, match=r"refuses them: TemplateError$"):
        Tokenizer.load(folder).chat([{"role": "user", "content": "Hello"}])


ADOPTED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number from 1 to"),
    "endless layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a"),
    "layers that are a text": ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', not a"),
    "no window": ({"sliding_window": None}, "makes no Olmo3ForCausalLM in transformers: "),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
}


@pytest.mark.parametrize("case", ADOPTED_CONFIGS)
def test_an_adopted_config_that_makes_no_model_is_refused_in_a_sentence(
    case: str, tmp_path: Path
) -> None:
    change, said = ADOPTED_CONFIGS[case]
    config = {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 97,
        **change,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MinisglError, match=said) as refused:
        read_model_config(tmp_path)
    assert refused.value.exit_code == 2


def test_a_number_of_layers_in_a_text_part_and_under_another_name_is_checked(
    tmp_path: Path,
) -> None:
    for architecture, fields in (
        ("LlavaForConditionalGeneration", {"text_config": {"num_hidden_layers": 10**9}}),
        ("GPT2LMHeadModel", {"n_layer": 10**9}),
    ):
        config = {"architectures": [architecture], **fields}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="is 1000000000, not a whole number from 1 to"):
            read_model_config(tmp_path)


def add_tokens(folder: Path, num: int, file: str) -> None:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {2048 + n: {"content": f"<{n}>", "special": True, **token} for n in range(num)}
    values = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    if file == "tokenizer.json":
        values["added_tokens"] += [{"id": n, **entry} for n, entry in added.items()]
    elif file == "tokenizer_config.json":
        values["added_tokens_decoder"] = added
    else:
        values = {entry["content"]: n for n, entry in added.items()}
    (folder / file).write_text(json.dumps(values))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_too_many_added_tokens_are_refused_before_they_are_read(folder: Path, file: str) -> None:
    add_tokens(folder, 70_000, file)
    with pytest.raises(CheckpointError, match=rf"{file} adds 70,0\d\d tokens .* allowed: 65,536"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("file", "listed"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {str(n): {"content": f"<{n}>"} for n in range(70_000)}},
        ),
        (
            "tokenizer_config.json",
            {"extra_special_tokens": {f"t{n}": f"<{n}>" for n in range(70_000)}},
        ),
        ("tokenizer_config.json", {"extra_special_tokens": [f"<{n}>" for n in range(70_000)]}),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": [f"<{n}>" for n in range(70_000)]},
        ),
    ],
)
def test_too_many_tokens_are_refused_in_any_form(folder: Path, file: str, listed: Any) -> None:
    values = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**values, **listed}))
    with pytest.raises(CheckpointError, match=rf"{file} adds 70,000 tokens .* allowed: 65,536"):
        Tokenizer.load(folder)


def test_many_added_tokens_are_added_in_one_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes time for all tokens that were added before."""
    calls: list[int] = []

    class Counting:
        def __init__(self, model: Any) -> None:
            self.__dict__["made"] = Backend(model)

        def add_tokens(self, tokens: Sequence[Any]) -> None:
            calls.append(len(tokens))
            self.__dict__["made"].add_tokens(tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["made"], name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.__dict__["made"], name, value)

    add_tokens(folder, 5_000, "tokenizer.json")
    monkeypatch.setattr(control_spellings.tokenizers, "Tokenizer", Counting)
    tokenizer = Tokenizer.load(folder)
    assert len(calls) <= 2
    assert calls[-1] > 5_000
    ids = tokenizer.chat([{"role": "user", "content": "<7> and <4999>"}])
    assert not {2055, 7047} & {*ids}  # the user's text is no control token


@pytest.mark.parametrize(
    "template",
    ["{% if a %}" * 60_000 + "x" + "{% endif %}" * 60_000, "{% if a %}x{% endif %}" * 60_000],
    ids=["nested", "side by side"],
)
def test_a_chat_template_of_more_than_a_mebibyte_is_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=r"has 1,\d{3},\d{3} characters; allowed: 1,048,576"):
        Tokenizer.load(folder)
