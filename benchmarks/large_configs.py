"""How long does a prediction for a model of hundreds of billions of parameters take, and how much memory?

    python benchmarks/large_configs.py [--rounds 3] [--out benchmarks/results/large_configs.json]

A dense config of 405 billion parameters and one with 128 experts, as Hugging Face folders without weights, each
predicted in decode on a node of 8 H200: the whole command in a process of its own, imports included, in turn. Wall
seconds, CPU seconds and peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

CONFIGS: dict[str, dict[str, object]] = {
    "llama-405b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384,
        "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16",
    },
    "qwen3-moe-128-experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16",
    },
}  # fmt: skip
OPTIONS = ("--device", "8xh200", "--mode", "decode", "--context", "4096", "--json")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    batch_size: int


def run(folder: Path) -> Run:
    """Predicts the model of a folder in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "microbatch", "predict", str(folder), *OPTIONS], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    document = json.load(process.stdout)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"The prediction of {folder.name} ended with status {process.returncode}.")
    return Run(seconds, used.ru_utime + used.ru_stime, _peak_bytes(used), document["recommended"]["batch_size"])


def _peak_bytes(used: resource.struct_rusage) -> int:
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    runs: dict[str, list[Run]] = {name: [] for name in CONFIGS}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        for _ in range(options.rounds):
            for name, done in runs.items():
                done.append(run(Path(folder) / name))
    for name, done in runs.items():
        seconds, peak = [one.seconds for one in done], max(one.peak_bytes for one in done)
        times = f"median {median(seconds):.1f} s, most {max(seconds):.1f} s"
        print(f"{name}: {times}, {peak / 1e9:.2f} GB, batch {done[-1].batch_size}")
    if options.out:
        result = {
            "python": platform.python_version(),
            "load_before": load_before,
            "runs": {name: [asdict(one) for one in done] for name, done in runs.items()},
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
