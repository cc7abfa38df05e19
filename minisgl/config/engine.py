"""The options of the engine, as the user sets them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import partial

from minisgl.config.facts import DTYPES, MAX_SEQ_LEN
from minisgl.config.options import check_at_least, check_types, option, option_names, refuse
from minisgl.errors import ConfigError, one_of
from minisgl.request import DEFAULT_LOGPROBS, MAX_LOGPROBS

QUANTIZATIONS = ("fp8",)
TASKS = ("generate", "embed", "rerank")
MOST_DRAFTS = 15
LORA_RANK_UNIT, MOST_LORA_RANK = 16, 320
DEFAULT_LORAS = 8
ATTENTION_BACKENDS = ("fa", "fi", "trtllm", "triton", "torch")
HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
MOST_GB = 1_000_000  # of any memory
model_option = partial(option, group="Model")
parallel_option = partial(option, group="Parallelism")
memory_option = partial(option, group="Memory")
scheduling_option = partial(option, group="Scheduling")
training_option = partial(option, group="Training")
draft_option = partial(option, group="Speculation")
adapter_option = partial(option, group="Adapters")
image_option = partial(option, group="Images")
kernel_option = partial(option, group="Kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options as the user set them. Raises ConfigError for values that are always invalid."""

    model: str = model_option(
        "",
        "Local folder or Hugging Face id; the bundled demo model if not given.",
        names=("--model", "--model-path"),
    )
    dtype: str = model_option(
        "auto", "auto, bfloat16, float16 or float32.", choices=("auto", *DTYPES)
    )
    device: str = model_option("auto", "auto, cuda or cpu.", choices=("auto", "cuda", "cpu"))
    load_format: str = model_option(
        "auto", "auto (safetensors) or dummy (random weights).", choices=("auto", "dummy")
    )
    quantization: str | None = model_option(
        None,
        "fp8: round the weights of an unquantised checkpoint to FP8 while they are loaded; a "
        "quantised one says itself how.",
        choices=QUANTIZATIONS,
    )
    model_impl: str = model_option(
        "auto",
        "native runs minisgl's code for the architecture, adopted transformers' with minisgl's "
        "kernels; auto takes the first that there is.",
        choices=("auto", "native", "adopted"),
    )
    task: str = model_option(
        "auto",
        "What the model is for: generate, embed (a vector for each text) or rerank (scores of "
        "documents for a query); auto is embed for a checkpoint with modules.json, else generate.",
        choices=("auto", *TASKS),
    )
    max_seq_len_override: int | None = model_option(
        None,
        "Longest sequence in tokens; the model's own if not given.",
        names=("--max-seq-len-override", "--max-model-len"),
    )
    chat_template: str | None = model_option(
        None, "File with a Jinja template for conversations, in place of the checkpoint's own."
    )
    tp: int = parallel_option(
        1,
        "Number of tensor-parallel ranks of a stage, on all nodes together.",
        names=("--tp", "--tensor-parallel-size", "--tp-size"),
    )
    dp_attention: bool = parallel_option(
        False,
        "Let each tensor-parallel rank attend for its own requests with all heads, in place of for "
        "all requests with some heads.",
        names=("--dp-attention", "--enable-dp-attention"),
    )
    pp: int = parallel_option(
        1,
        "Number of pipeline stages, each of --tp ranks and with a part of the layers.",
        names=("--pp", "--pipeline-parallel-size", "--pp-size"),
    )
    ep: bool = parallel_option(
        False,
        "Divide the experts of a mixture among the ranks of --tp as whole ones, in place of a part "
        "of each.",
        names=("--ep", "--enable-expert-parallel"),
    )
    parallel: str = parallel_option(
        "given",
        "given: --tp, --ep and --dp-attention say how GPUs share the model. auto: as the "
        "arithmetic in the log prefers, on all GPUs or as many as --tp says; heads: without "
        "--dp-attention.",
        choices=("given", "auto", "heads"),
    )
    nnodes: int = parallel_option(1, "Number of machines that share the ranks evenly.")
    node_rank: int = parallel_option(
        0, "Number of this machine, from 0 on; 0 serves, the others work for it."
    )
    master_addr: str = parallel_option(
        "127.0.0.1", "Address of machine 0, on which it listens for the others."
    )
    master_port: int = parallel_option(
        29500, "Port of machine 0, on which it listens for the others."
    )
    cluster_token_file: str = parallel_option(
        "", "File with the secret that all machines share; MINISGL_CLUSTER_TOKEN if not given."
    )
    disable_pynccl: bool = parallel_option(
        False, "Use torch.distributed's own collectives for everything."
    )
    memory_ratio: float = memory_option(
        0.9,
        "Fraction of the GPU memory free at start for weights, activations and KV cache together.",
        names=("--memory-ratio", "--gpu-memory-utilization"),
    )
    num_pages: int | None = memory_option(
        None, "Size of the KV cache in pages; all that memory allows if not given."
    )
    page_size: int | None = memory_option(
        None, "Tokens per page of the KV cache; chosen for the attention backend if not given."
    )
    cache_type: str = memory_option(
        "radix",
        "Prefix cache: radix or naive.",
        names=("--cache-type", "--cache"),
        choices=("radix", "naive"),
    )
    kv_cache_dtype: str = memory_option(
        "auto",
        "Numbers in the KV cache: auto (fp8 if the checkpoint brings scales), model (those of "
        "--dtype) or fp8 (half the memory of 16 bits).",
        choices=("auto", "model", "fp8"),
    )
    dense_copies: str = memory_option(
        "auto",
        "Keep INT4 and NVFP4 weights in the model's dtype, too, for steps of many tokens on a GPU: "
        "auto (if that leaves most of the memory to the KV cache), always or never.",
        choices=("auto", "always", "never"),
    )
    host_cache: float = memory_option(
        0.0,
        "GB of host memory for prefixes that fall out of the KV cache, over all ranks; they are "
        "loaded again where that is faster than computing them. 0 turns it off.",
    )
    whole_pages: bool = memory_option(
        False,
        "Keep what is behind sliding windows in the KV cache, too: then engines with --roles "
        "exchange pages straight from GPU to GPU.",
    )
    state_cache: float | None = memory_option(
        None,
        "For models that keep a state of each request: GB on the devices, over all ranks, for "
        "snapshots from which the prefix cache goes on; if not given, a part of what is left. 0 "
        "turns it off.",
    )
    disk_cache: str | None = memory_option(
        None,
        "Folder for prefixes that fall out of --host-cache, which is needed; they outlive the "
        "server, and servers on one host may share them. What prompts say can be told from it.",
    )
    disk_cache_gb: float = memory_option(
        100.0, "Most GB of files in --disk-cache, of all servers together."
    )
    max_running_requests: int = scheduling_option(
        256, "Maximum number of concurrently running requests."
    )
    max_queued_requests: int = scheduling_option(
        2048, "Maximum number of waiting requests; further ones are refused."
    )
    max_prefill_length: int = scheduling_option(
        8192, "Maximum number of prompt tokens per step; longer prompts are prefilled in chunks."
    )
    schedule_policy: str = scheduling_option(
        "fcfs", "fcfs (in order) or lpm (longest cached prefix first).", choices=("fcfs", "lpm")
    )
    schedule_conservativeness: float = scheduling_option(
        1.0, "Scales the reserve for tokens not yet generated; under 1 admits more and may retract."
    )
    key_share: float = scheduling_option(
        0.9,
        "With several API keys: the part of what the other keys leave that the running requests of "
        "one key may take, of the slots and of the KV cache. 1 keeps nothing free.",
    )
    step_timeout: float = scheduling_option(
        30.0,
        "Seconds that a step may take longer than ones like it before the engine fails; a third of "
        "it makes /health say so.",
    )
    max_logprobs: int = training_option(
        DEFAULT_LOGPROBS,
        f"Most alternatives that a request may ask for with each logprob, up to {MAX_LOGPROBS}.",
    )
    logprobs_mode: str = training_option(
        "raw_logprobs",
        "Of sampled tokens: raw_logprobs (of the logits) or processed_logprobs (of what they are "
        "drawn from, after penalties and filters; slower with top_p).",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    head_dtype: str = training_option(
        "auto",
        "Numbers of the logits: auto (those of --dtype) or float32 (of the same weights; the "
        "logits take twice the memory, and on a CPU each step converts the weights of the head).",
        choices=("auto", "float32"),
    )
    return_routed_experts: bool = training_option(
        False,
        "Let requests ask for the experts of their tokens. Their prompts use no cached prefix; "
        "each such layer makes a copy more.",
        names=("--return-routed-experts", "--enable-return-routed-experts"),
    )
    batch_invariant: bool = training_option(
        False,
        "Let no bit of tokens and logprobs depend on other requests, chunks, cached prefixes or "
        "CUDA graphs. Steps are slower, and on a CPU each row is computed by itself.",
    )
    speculative: str | None = draft_option(
        None,
        "Guess tokens and verify them, which changes no answer: ngram (what followed the same "
        "words before), mtp (a layer that some models bring), or an EAGLE-3 head or small model, "
        "as a folder or id.",
    )
    draft_tokens: int = draft_option(
        3, "Most tokens that --speculative guesses for a request and step."
    )
    draft_acceptance: float | None = draft_option(
        None,
        "For measurements with --load-format dummy: accept each guess of --speculative with this "
        "probability, given that the one before it was, whatever the model says.",
    )
    lora: tuple[str, ...] = adapter_option(
        (),
        "NAME=FOLDER: a LoRA adapter as PEFT saves it, by whose name requests ask for it; may be "
        "given several times.",
    )
    max_loras: int | None = adapter_option(
        None,
        "Adapters on the device at once, whose rows share steps; if not given, all of --lora, up "
        f"to {DEFAULT_LORAS}. Others wait in host memory. Loading adapters later needs some, too.",
    )
    max_lora_rank: int = adapter_option(
        64,
        f"The largest rank of an adapter, a multiple of {LORA_RANK_UNIT}, for which each place on "
        "the device has room.",
    )
    lora_experts: bool = adapter_option(
        False,
        "Give each place room for adapters of a model's experts, also if none of --lora has some.",
    )
    image_hosts: tuple[str, ...] = image_option(
        (),
        "HOST: a name from which the server fetches images by http(s) for requests; may be given "
        "several times. Without it images come as data: URLs only.",
    )
    image_rows: int = image_option(
        8192,
        "Tokens of images that the device has room for at once, and so of the images of one "
        "request; 0 runs a model that sees without its tower.",
    )
    attn: str = kernel_option(
        "auto",
        "auto, a backend for both phases, or a pair PREFILL,DECODE.",
        names=("--attn", "--attention-backend"),
    )
    cuda_graph_max_bs: int | None = kernel_option(
        None, "Largest batch whose decoding runs as a CUDA graph; 0 turns graphs off."
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("tp", "pp", "nnodes", "page_size", "max_seq_len_override"):
            check_at_least(self, name, 1)
        if (self.max_seq_len_override or 0) > MAX_SEQ_LEN:
            refuse(self, "max_seq_len_override", f"allowed: 1 to {MAX_SEQ_LEN}")
        if self.parallel == "auto" and self.ep:
            refuse(self, "parallel", "it decides about --ep itself; allowed: auto without --ep")
        self._check_nodes()
        if self.dp_attention:
            self._check_dp_attention()
        check_at_least(self, "num_pages", 2)
        for name in ("max_running_requests", "max_queued_requests", "max_prefill_length"):
            check_at_least(self, name, 1)
        check_at_least(self, "cuda_graph_max_bs", 0)
        check_at_least(self, "image_rows", 0)
        if not 0 <= self.host_cache < math.inf:
            refuse(self, "host_cache", "allowed: a number of GB, or 0 for none")
        if self.state_cache is not None and not 0 <= self.state_cache <= MOST_GB:
            refuse(self, "state_cache", f"allowed: a number of GB up to {MOST_GB:,}, or 0 for none")
        if self.disk_cache is not None and not self.disk_cache:
            refuse(self, "disk_cache", "allowed: a folder")
        if self.disk_cache is not None and not self.host_cache:
            refuse(self, "disk_cache", "it keeps what falls out of --host-cache, which is off")
        if self.disk_cache is not None and self.nnodes > 1:
            refuse(self, "disk_cache", "it is for the ranks of one node; allowed: --nnodes 1")
        if not 0 < self.disk_cache_gb < math.inf:
            refuse(self, "disk_cache_gb", "allowed: a number of GB above 0")
        if not 0 < self.memory_ratio <= 1:
            refuse(self, "memory_ratio", "allowed: above 0 and at most 1")
        if not 0 < self.schedule_conservativeness < math.inf:
            refuse(self, "schedule_conservativeness", "allowed: a number above 0")
        if not 0 < self.key_share <= 1:
            refuse(self, "key_share", "allowed: above 0 and at most 1")
        if not DEFAULT_LOGPROBS <= self.max_logprobs <= MAX_LOGPROBS:
            refuse(self, "max_logprobs", f"allowed: {DEFAULT_LOGPROBS} to {MAX_LOGPROBS}")
        if not self.step_timeout > 0:
            refuse(self, "step_timeout", "allowed: a number above 0, or inf")
        if self.speculative == "":
            refuse(self, "speculative", "allowed: ngram, mtp, or the drafter's folder or Hub id")
        if not 1 <= self.draft_tokens <= MOST_DRAFTS:
            refuse(self, "draft_tokens", f"allowed: 1 to {MOST_DRAFTS}")
        self._check_acceptance()
        self._check_adapters()
        for host in self.image_hosts:
            if not HOST.fullmatch(host):
                raise ConfigError("--image-hosts", host, "allowed: a name such as example.com")
        backends = self.attn.split(",")
        if self.attn != "auto" and (
            len(backends) > 2 or any(name not in ATTENTION_BACKENDS for name in backends)
        ):
            choices = one_of(("auto", *ATTENTION_BACKENDS))
            refuse(self, "attn", f"{choices}, or a pair PREFILL,DECODE")

    def _check_acceptance(self) -> None:
        if self.draft_acceptance is None:
            return
        if not 0 <= self.draft_acceptance <= 1:
            refuse(self, "draft_acceptance", "allowed: 0 to 1")
        if self.load_format != "dummy":
            reason = "it makes answers wrong, and is only for speed; allowed: --load-format dummy"
            refuse(self, "draft_acceptance", reason)
        if self.speculative is None:
            refuse(self, "draft_acceptance", "nothing is guessed without --speculative")

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of --lora by the names of the adapters."""
        return dict(each.split("=", 1) for each in self.lora)

    def _check_adapters(self) -> None:
        names = [each.partition("=")[0] for each in self.lora]
        for each in self.lora:
            name, _, folder = each.partition("=")
            if not (name and folder):
                raise ConfigError("--lora", each, "allowed: NAME=FOLDER")
            if names.count(name) > 1:
                raise ConfigError("--lora", each, f"the name {name} is given twice; allowed: once")
        check_at_least(self, "max_loras", 1)
        if self.max_lora_rank not in range(LORA_RANK_UNIT, MOST_LORA_RANK + 1, LORA_RANK_UNIT):
            allowed = f"allowed: multiples of {LORA_RANK_UNIT} up to {MOST_LORA_RANK}"
            refuse(self, "max_lora_rank", allowed)

    def _check_dp_attention(self) -> None:
        if self.tp == 1:
            refuse(self, "dp_attention", "--tp 1 is one rank, which attends for all; allowed: off")
        if self.max_running_requests < self.tp:
            reason = f"each of {self.tp} ranks attends for its own (--dp-attention)"
            refuse(self, "max_running_requests", f"{reason}; allowed: {self.tp} or more")

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            refuse(self, "node_rank", f"allowed: 0 to {self.nnodes - 1} (--nnodes {self.nnodes})")
        if self.tp * self.pp % self.nnodes:
            what = "--tp" if self.pp == 1 else "--tp times --pp"
            reason = (
                f"the nodes cannot share {self.tp * self.pp} ranks ({what}) evenly; "
                f"allowed: {what} a multiple of {self.nnodes}"
            )
            refuse(self, "nnodes", reason)
        if not self.master_addr:
            refuse(self, "master_addr", "allowed: a host name or an address")
        if not 1 <= self.master_port <= 65535:
            refuse(self, "master_port", "allowed: 1 to 65535")


def refuse_engine_options(config: EngineConfig) -> None:
    """Raise ConfigError for options that have no effect with --url, which starts no engine."""
    for spec in fields(config):
        value = getattr(config, spec.name)
        if spec.name != "model" and value != spec.default:
            reason = "is for an engine of its own, and with --url there is none"
            first = value[0] if isinstance(value, tuple) else value
            raise ConfigError(option_names(spec)[0], first, reason)
