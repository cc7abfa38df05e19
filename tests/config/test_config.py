"""Validation of options, and the resolution of automatic ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.resolving import CPU, GPU, MODEL, resolved

from minisgl.config import (
    FP8,
    Capacity,
    DeviceFacts,
    EngineConfig,
    KVScales,
    overlap_enabled,
)
from minisgl.errors import ConfigError, UnsupportedModelError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, r"^--dtype int8: allowed: auto, bfloat16, float16 or float32$"),
        ({"device": "tpu"}, r"^--device tpu: allowed: auto, cuda or cpu$"),
        ({"load_format": "gguf"}, "--load-format gguf"),
        ({"cache_type": "lru"}, r"^--cache-type lru: allowed: radix or naive$"),
        ({"kv_cache_dtype": "e5m2"}, "--kv-cache-dtype e5m2: allowed: auto, model or fp8"),
        ({"dense_copies": "yes"}, r"^--dense-copies yes: allowed: auto, always or never$"),
        ({"schedule_policy": "random"}, "--schedule-policy random: allowed: fcfs or lpm"),
        ({"attn": "fi,fa,fi"}, "--attn fi,fa,fi: allowed: .*or a pair PREFILL,DECODE"),
        ({"attn": "auto,fi"}, "--attn auto,fi"),
        ({"memory_ratio": 0.0}, "--memory-ratio 0.0: allowed: above 0 and at most 1"),
        ({"memory_ratio": float("nan")}, "--memory-ratio nan"),
        ({"key_share": 0.0}, "--key-share 0.0"),
        ({"key_share": 1.1}, "--key-share 1.1"),
        ({"schedule_conservativeness": 0.0}, "--schedule-conservativeness 0.0"),
        ({"num_pages": 1}, r"^--num-pages 1: allowed: 2 or more$"),
        ({"page_size": 0}, "--page-size 0: allowed: 1 or more"),
        ({"max_seq_len_override": 0}, "--max-seq-len-override 0"),
        (
            {"max_seq_len_override": 999_999_999},
            "^--max-seq-len-override 999999999: allowed: 1 to 16777216$",
        ),
        ({"tp": 0}, "--tp 0: allowed: 1 or more"),
        (
            {"dp_attention": True},
            "--dp-attention: --tp 1 is one rank, which attends for all; allowed: off",
        ),
        (
            {"dp_attention": True, "tp": 4, "max_running_requests": 3},
            r"--max-running-requests 3: each of 4 ranks attends for its own \(--dp-attention\); "
            "allowed: 4 or more$",
        ),
        ({"max_prefill_length": 0}, "--max-prefill-length 0"),
        ({"cuda_graph_max_bs": -1}, "--cuda-graph-max-bs -1"),
        ({"num_pages": "100"}, "--num-pages 100: allowed: None or a whole number"),
        ({"tp": True}, "--tp True: allowed: a whole number"),
        ({"model": None}, "--model None: allowed: a text"),
        ({"nnodes": 0}, "--nnodes 0: allowed: 1 or more"),
        (
            {"tp": 3, "nnodes": 2},
            r"^--nnodes 2: the nodes cannot share 3 ranks \(--tp\) evenly; "
            "allowed: --tp a multiple of 2$",
        ),
        ({"node_rank": 1}, r"^--node-rank 1: allowed: 0 to 0 \(--nnodes 1\)$"),
        ({"tp": 2, "nnodes": 2, "node_rank": -1}, r"--node-rank -1: allowed: 0 to 1"),
        ({"master_port": 0}, "--master-port 0: allowed: 1 to 65535"),
        ({"master_addr": ""}, "--master-addr : allowed: a host name or an address"),
    ],
)
def test_an_invalid_value_is_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**options)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "--device cuda: PyTorch finds no usable GPU"),
        ({"attn": "fi"}, "--attn fi: fi needs a GPU; allowed: auto or torch"),
        ({"attn": "torch,fi"}, "--attn torch,fi: fi needs a GPU"),
        (
            {"tp": 3},
            "--tp 3: cannot shard this model over 3 ranks: its 4 heads, 2 KV heads, MLP of 3072 or "
            "vocabulary of 1000 is not divisible; allowed: 1, 2 or 4",
        ),
        ({"cuda_graph_max_bs": 8}, "--cuda-graph-max-bs 8: CUDA graphs need a GPU; allowed: 0"),
    ],
)
def test_a_value_that_does_not_suit_model_or_machine_is_refused_with_the_reason(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn": "fa"}, "--attn fa: flash-attn is not installed; allowed: auto, fi, trtllm"),
        (
            {"attn": "fi", "dtype": "float32"},
            "--attn fi: fi computes in bfloat16 and float16 only; allowed: auto, triton or torch",
        ),
        ({"attn": "fi", "page_size": 24}, "--page-size 24: fi takes a power of two"),
        ({"attn": "torch", "cuda_graph_max_bs": 4}, "decoding by torch .*allowed: 0"),
    ],
)
def test_a_value_that_does_not_suit_the_gpu_is_refused_with_the_reason(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(machine=GPU, **options)


def test_auto_chooses_the_best_available_backends() -> None:
    def chosen(attn: str, machine: DeviceFacts = GPU, **options: Any) -> tuple[str, str]:
        config = resolved(machine=machine, attn=attn, **options)
        return config.attn_prefill, config.attn_decode

    assert chosen("auto") == ("fi", "triton")
    assert chosen("auto", dtype="float32") == ("triton", "triton")
    assert chosen("auto", device="cpu") == chosen("auto", CPU) == ("torch", "torch")
    assert chosen("trtllm") == ("trtllm", "trtllm")
    assert chosen("fi,triton") == ("fi", "triton")


def test_auto_takes_no_backend_whose_steps_are_shorter() -> None:
    """Of prompts: to decode, it has room for all rows. Who chooses it gets it."""
    backends = tuple(
        dataclasses.replace(each, most_prompt_tokens=None if each.name == "triton" else 9000)
        for each in GPU.backends
    )
    machine = dataclasses.replace(GPU, backends=backends)

    def chosen(attn: str, most: int) -> tuple[str, str]:
        config = resolved(machine=machine, attn=attn, max_prefill_length=most)
        return config.attn_prefill, config.attn_decode

    assert chosen("auto", 9000) == ("fi", "triton")
    assert chosen("auto", 9001) == ("triton", "triton")
    assert chosen("fi,trtllm", 9001) == ("fi", "trtllm")


@pytest.mark.parametrize(
    ("attn", "given", "expected"),
    [
        ("auto", None, 16),
        ("triton", 5, 5),
        ("trtllm", None, 64),
        ("trtllm", 32, 32),
        ("trtllm", 8, 64),
        ("fi", None, 64),
        ("fi", 1, 1),
        ("torch", None, 16),
    ],
)
def test_the_page_size_is_adjusted_to_the_backend_with_a_note(
    attn: str, given: int | None, expected: int
) -> None:
    config = resolved(machine=GPU, attn=attn, page_size=given)
    assert config.page_size == expected
    warned = any(note.startswith("page size 64 instead of 8: trtllm") for note in config.notes)
    assert warned == (given == 8)


def test_flash_attn_2_requires_pages_that_are_a_multiple_of_256() -> None:
    old = [dataclasses.replace(b, page_multiple=256) for b in GPU.backends if b.name == "fa"]
    flash = dataclasses.replace(GPU, backends=tuple(old), missing_backends={})
    assert resolved(machine=flash, attn="fa").page_size == 256
    assert resolved(machine=flash, attn="fa", page_size=512).page_size == 512
    with pytest.raises(ConfigError, match="--page-size 64: fa takes a multiple of 256 here"):
        resolved(machine=flash, attn="fa", page_size=64)


def test_the_largest_captured_batch_follows_device_and_options() -> None:
    assert resolved().cuda_graph_max_bs == 0
    assert resolved(machine=GPU).cuda_graph_max_bs == 256
    assert resolved(machine=GPU, max_running_requests=7).cuda_graph_max_bs == 7
    assert resolved(machine=GPU, max_running_requests=4096).cuda_graph_max_bs == 512
    assert resolved(machine=GPU, cuda_graph_max_bs=0).cuda_graph_max_bs == 0
    assert resolved(machine=GPU, cuda_graph_max_bs=33).cuda_graph_max_bs == 33
    eager = resolved(machine=GPU, attn="fi")
    assert eager.cuda_graph_max_bs == 0
    assert any("decoding by fi" in note for note in eager.notes)
    without = dataclasses.replace(GPU, missing_backends={"triton": "triton is not installed"})
    assert resolved(machine=without, attn="trtllm").cuda_graph_max_bs == 0


def test_resolving_leaves_no_option_automatic() -> None:
    for device in (CPU, GPU):
        config = resolved(machine=device)
        for spec in dataclasses.fields(config):
            if spec.name != "windows":  # the model has none
                assert getattr(config, spec.name) not in (None, "auto"), spec.name


@pytest.mark.parametrize(
    ("checkpoint", "device", "option", "expected"),
    [
        ("bfloat16", CPU, "auto", "float32"),
        ("bfloat16", GPU, "auto", "bfloat16"),
        ("float16", GPU, "auto", "float16"),
        ("float32", GPU, "auto", "float16"),
        ("float32", GPU, "float32", "float32"),
        ("float32", CPU, "bfloat16", "bfloat16"),
    ],
)
def test_auto_dtype_follows_the_checkpoint_and_the_device(
    checkpoint: str, device: DeviceFacts, option: str, expected: str
) -> None:
    config = resolved(dataclasses.replace(MODEL, dtype=checkpoint), device, dtype=option)
    assert config.dtype == expected
    warned = any("--dtype bfloat16" in note for note in config.notes)
    assert warned == (checkpoint == "float32" and option == "auto" and device is GPU)


def test_an_override_changes_the_longest_sequence_unless_rope_forbids_it() -> None:
    assert resolved().max_seq_len == 4096
    longer = resolved(max_seq_len_override=9000)
    assert longer.max_seq_len == 9000
    assert "the model was made for 4096 tokens, not for 9000" in longer.notes
    fixed = dataclasses.replace(MODEL, max_seq_len_reason="dynamic rope would turn cached keys")
    assert resolved(fixed, max_seq_len_override=100).max_seq_len == 100
    with pytest.raises(ConfigError, match=r"dynamic rope .*at most 4096"):
        resolved(fixed, max_seq_len_override=4097)


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_model_that_no_backend_computes_is_refused(machine: DeviceFacts) -> None:
    windowless = dataclasses.replace(
        machine,
        backends=tuple(backend for backend in machine.backends if backend.name == "torch"),
        missing_backends={"torch": "torch computes no sliding windows"},
    )
    with pytest.raises(UnsupportedModelError, match="here: torch computes no sliding windows"):
        resolved(machine=windowless)


def test_the_number_of_pages_is_fixed_on_a_cpu_and_measured_on_a_gpu() -> None:
    assert resolved().num_pages == 1 + 65_536 // 16
    assert resolved(page_size=64).num_pages == 1 + 1024
    small = dataclasses.replace(CPU, free_cpu_bytes=64 << 20)
    bytes_per_token = MODEL.kv_bytes_per_token("float32")
    assert resolved(machine=small).num_pages == 1 + (16 << 20) // bytes_per_token // 16
    assert resolved(machine=GPU).num_pages == 0
    assert resolved(machine=GPU, num_pages=7).num_pages == 7


def test_the_longest_sequence_is_limited_by_the_page_capacity() -> None:
    capacity = Capacity.of(resolved(page_size=16), num_pages=11)
    assert (capacity.max_seq_len, capacity.num_slots) == (160, 256)
    assert Capacity.of(resolved(page_size=16), num_pages=1000).max_seq_len == 4096


def test_an_environment_variable_disables_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MINISGL_DISABLE_OVERLAP_SCHEDULING"
    monkeypatch.delenv(name, raising=False)
    assert overlap_enabled()
    monkeypatch.setenv(name, "1")
    assert not overlap_enabled()
    monkeypatch.setenv(name, "0")
    assert overlap_enabled()
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ConfigError, match=f"{name} yes: allowed: 0 or 1"):
        overlap_enabled()


def test_more_ranks_than_gpus_are_refused() -> None:
    assert resolved(machine=GPU, tp=2).tp == 2
    with pytest.raises(ConfigError, match="--tp 4: there are 2 GPUs; allowed: 1 or 2"):
        resolved(machine=GPU, tp=4)


def test_stages_need_a_layer_and_a_gpu_for_each_rank() -> None:
    assert resolved(machine=GPU, pp=2).num_ranks == 2
    with pytest.raises(ConfigError, match="--pp 4: there are 2 GPUs; allowed: 1 or 2"):
        resolved(machine=GPU, pp=4)
    many = dataclasses.replace(GPU, num_gpus=4 * len(MODEL.attention))
    both = r"--pp \d+: there are \d+ GPUs, and each stage has 2 ranks \(--tp\); allowed: 1"
    with pytest.raises(ConfigError, match=both):
        resolved(machine=GPU, tp=2, pp=2)
    num_layers = len(MODEL.attention)
    with pytest.raises(ConfigError, match=f"this model has {num_layers} layers; allowed: 1"):
        resolved(machine=many, pp=num_layers + 1)
    with pytest.raises(ConfigError, match="--pp 9: at most 8 ranks on a CPU"):
        resolved(pp=9)


def test_stages_have_the_kv_caches_of_their_layers() -> None:
    scales = tuple(KVScales(0.5 * layer, 2.0) for layer in range(len(MODEL.attention)))
    model = dataclasses.replace(MODEL, kv_scales=scales)
    parts = [model.on_stage(layers).kv_specs(FP8) for layers in model.stages(2)]
    assert parts[0] + parts[1] == model.kv_specs(FP8)
    assert min(map(len, parts)) >= 1


def test_a_rank_holds_the_kv_heads_of_its_own_heads() -> None:
    heads = {tp: MODEL.on_rank(tp) for tp in (1, 2, 4)}
    for tp, expected in {1: (4, 2), 2: (2, 1), 4: (1, 1)}.items():
        for spec in heads[tp].attention:
            assert (spec.num_heads, spec.num_kv_heads) == expected
    assert 2 * heads[2].kv_bytes_per_token("bfloat16") == MODEL.kv_bytes_per_token("bfloat16")


BY_REQUEST = dataclasses.replace(MODEL, divides_heads=False)


def test_a_rank_of_its_own_requests_holds_every_kv_head() -> None:
    assert BY_REQUEST.can_divide(3) and not MODEL.can_divide(3)
    room = dataclasses.replace(CPU, free_cpu_bytes=4 * 1024 * MODEL.kv_bytes_per_token("float32"))
    by_head = resolved(MODEL, room, tp=2)
    own = resolved(BY_REQUEST, room, tp=2, dp_attention=True)
    num_tokens = [(config.num_pages - 1) * config.page_size for config in (by_head, own)]
    assert num_tokens == [1024, 512], "the machine has the memory of all ranks"
    assert BY_REQUEST.on_rank(4) is BY_REQUEST
    with pytest.raises(ConfigError, match="over 5 ranks: its MLP of 3072 or vocabulary"):
        resolved(BY_REQUEST, tp=5, dp_attention=True)


def test_ranks_of_their_own_requests_run_equally_many() -> None:
    config = resolved(BY_REQUEST, GPU, tp=2, dp_attention=True, max_running_requests=33)
    assert config.max_running_requests == 32 and config.num_attending == 2
    assert "32 requests at once instead of 33: so many are the same number on each of 2 ranks" in (
        config.notes
    )
    assert config.cuda_graph_max_bs == 32
    for wanted, captured in ((0, 0), (1, 2), (5, 6), (31, 32), (64, 32)):
        config = resolved(
            BY_REQUEST,
            GPU,
            tp=2,
            dp_attention=True,
            max_running_requests=33,
            cuda_graph_max_bs=wanted,
        )
        assert config.cuda_graph_max_bs == captured
    assert resolved(BY_REQUEST, GPU, tp=2, dp_attention=True).max_running_requests == 256
    assert resolved(machine=GPU, tp=2).num_attending == 1


SCALED = dataclasses.replace(MODEL, kv_scales=(KVScales(0.5, 0.25), KVScales(2.0, 1.0)))


def test_the_kv_cache_is_in_fp8_where_that_is_asked_for_or_the_checkpoint_brings_scales() -> None:
    for model, option, dtype in [
        (MODEL, "auto", "bfloat16"), (MODEL, "model", "bfloat16"), (MODEL, "fp8", FP8),
        (SCALED, "auto", FP8), (SCALED, "model", "bfloat16"), (SCALED, "fp8", FP8),
    ]:  # fmt: skip
        config = resolved(model, GPU, kv_cache_dtype=option)
        assert config.kv_dtype == dtype
        said = [note for note in config.notes if note.startswith("KV cache in FP8")]
        scales = "the scales of the checkpoint" if model is SCALED else "scales of 1"
        assert said == ([f"KV cache in FP8 (e4m3) with {scales}"] if dtype == FP8 else [])
    assert [spec.scales for spec in SCALED.kv_specs(FP8)] == list(SCALED.kv_scales or ())
    assert 2 * SCALED.kv_bytes_per_token(FP8) == SCALED.kv_bytes_per_token("bfloat16")
    assert SCALED.on_rank(2).kv_scales == SCALED.kv_scales


def test_a_gpu_without_fp8_refuses_it_and_auto_does_without() -> None:
    old = dataclasses.replace(GPU, compute_capability=(8, 6))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: .* 8.9 or newer, .* has 8.6; a"):
        resolved(machine=old, kv_cache_dtype="fp8")
    config = resolved(SCALED, old)
    assert config.kv_dtype == "bfloat16"
    assert any("although the checkpoint brings FP8 scales: FP8 needs" in n for n in config.notes)
    assert resolved(SCALED).kv_dtype == FP8  # on a CPU


def test_backends_for_an_fp8_cache() -> None:
    """flash-attn reads none, and FlashInfer prefills with its slower kernel, which a note says."""
    machine = dataclasses.replace(GPU, missing_backends={})
    config = resolved(machine=machine, kv_cache_dtype="fp8")
    assert (config.attn_prefill, config.attn_decode) == ("triton", "triton")
    without = dict.fromkeys(("triton", "torch"), "is not installed")
    config = resolved(
        machine=dataclasses.replace(GPU, missing_backends=without), kv_cache_dtype="fp8"
    )
    assert (config.attn_prefill, config.attn_decode) == ("fi", "trtllm")
    prefill, decode = "fi prefills by FlashAttention 2", "trtllm decodes with queries and"
    for attn, said in (
        ("fi,trtllm", {prefill, decode}),
        ("fi,triton", {prefill}),
        ("triton,fi", ()),
    ):
        notes = "\n".join(resolved(machine=machine, kv_cache_dtype="fp8", attn=attn).notes)
        assert {each for each in (prefill, decode) if each in notes} == set(said)
    for attn in ("fa", "triton,fa"):
        with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: --attn fa reads no FP8; allo"):
            resolved(machine=machine, kv_cache_dtype="fp8", attn=attn)
    config = resolved(SCALED, machine, attn="fa")
    assert config.kv_dtype == "bfloat16"
    assert any(note.endswith("--attn fa reads no FP8") for note in config.notes)
