"""Trains the demo model by GRPO, with TRL and a server of minisgl, on a CPU:
`python scripts/examples/grpo.py [FOLDER [ADDRESS]]`. Needs `pip install trl aiohttp`.

An answer that names red is worth 1, and any other 0. TRL's asynchronous trainer has the server
answer, and sends it the weights after each step, through its own clients for vLLM. Give a folder
for the trained model, and the address of a server with `--trainer`, with its admin key, such as
`http://trl:SECRET@127.0.0.1:1919`; otherwise the program starts one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl_on_cpu import compute_on_cpu, stand_in_for_vllm

from minisgl.models.hub import DEMO_FOLDER

stand_in_for_vllm()  # also in TRL's process for answers, which imports this module

QUESTIONS = ["What is a colour?", "Tell me a colour.", "Name a colour."]
# How TRL reads an answer, given as it knows only the chat templates of some models.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


def names_red(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward of each answer."""
    return [float("red" in completion[-1]["content"].split(".")[0]) for completion in completions]


class Report(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            kl = f"KL from the server's tokens {logs['kl']:.1e}"
            print(f"step {state.global_step}: reward {logs['reward']:.2f}, {kl}", flush=True)


def main() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    compute_on_cpu()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    tokenizer.response_template = RESPONSE
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with server() as url, tempfile.TemporaryDirectory() as scratch:
        options = AsyncGRPOConfig(
            output_dir=sys.argv[1] if len(sys.argv) > 1 else scratch,
            vllm_server_base_url=url,
            max_steps=20,
            learning_rate=2e-5,
            num_generations=8,
            per_device_train_batch_size=24,
            token_budget=0,  # each step takes per_device_train_batch_size answers
            max_completion_length=16,
            max_staleness=1,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = AsyncGRPOTrainer(
            str(DEMO_FOLDER),
            names_red,
            options,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if len(sys.argv) > 1:
            trainer.save_model()


@contextmanager
def server() -> Iterator[str]:
    """The address that was given, or that of a server which ends with the context."""
    if len(sys.argv) > 2:
        yield sys.argv[2]
        return
    # TRL asks for the model by the name that it has loaded it by.
    command = [sys.executable, "-m", "minisgl", "serve", str(DEMO_FOLDER), "--port", "0"]
    command += ["--dtype", "float32", "--trainer", "--admin-key", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        try:
            line = next(line for line in started.stderr if " at http://" in line)
            yield line.split(" at ")[1].strip().replace("http://", "http://trl:demo@")
        finally:
            started.terminate()
            started.stderr.read()  # or a full pipe would keep it from ending


if __name__ == "__main__":
    main()
