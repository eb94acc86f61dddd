# SPDX-License-Identifier: Apache-2.0
"""Runs tools/gpu-check on the device of REMAT_TEST_DEVICE. Every part passes with tiny models. The error for a missing device is one sentence.

usage: gpu_check.py BUILD_FOLDER
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
#: Cases of each part. The part `suites` also has the C++ programs, if they are built.
CASES = {"devices": {"environment"}, "suites": {"devices.py"}, "memory": {"GPT with dropout", "Llama-like", "ResNet", "U-Net"},
         "bits": {"GPT with dropout", "Llama-like", "ResNet", "U-Net", "conv + batch norm", "encoder, bf16 autocast"},
         "speed": {"GPT-2", "Llama 1 B", "ResNet-50", "U-Net"}, "finetune": {"Llama 3 B"}}


def check(folder, build, *arguments, device=os.environ["REMAT_TEST_DEVICE"]):
    """Runs gpu-check. Returns (exit code, output, content of the JSON file)."""
    results = pathlib.Path(folder) / "results.json"
    command = [sys.executable, ROOT / "bench/gpu_check", "--built", build, "--python", sys.executable, "--json", results, "--device", device, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"REMAT_TEST_DEVICE": ""})
    return done.returncode, done.stdout + done.stderr, json.loads(results.read_text())


def main(build):
    with tempfile.TemporaryDirectory() as folder:
        for device, word in (("nonsense", "nonsense"), ("cpu", "cpu"), (os.environ["REMAT_TEST_DEVICE"] + ":7", ":7")):
            code, text, results = check(folder, build, device=device)
            assert code == 1 and word in results["problem"], (device, code, text)
            assert text == f"gpu-check: {results['problem']}\n", text
            assert not [row for row in results["rows"] if row["verdict"] == "passed"], results

        code, text, results = check(folder, build, "--tiny", "--minutes", "60")
        assert code == 0 and results["emulated"] and not results["problem"], text
        assert results["counts"]["failed"] == 0, text
        for part, cases in CASES.items():
            rows = [row for row in results["rows"] if row["part"] == part]
            assert cases <= {row["case"] for row in rows}, (part, text)
            assert part == "finetune" or [row for row in rows if row["verdict"] == "passed"], (part, text)
        assert not [row for row in results["rows"] if row["cause"].startswith("TimeoutError")], text
        judged = [row for row in results["rows"] if row["part"] == "speed" and row["goal"].startswith(("time", ">="))]
        assert judged and all(row["verdict"] == "not judged" for row in judged), text

        code, text, results = check(folder, build, "--tiny", "--parts", "bits", "--minutes", "0.1")
        causes = [row["cause"] for row in results["rows"] if row["verdict"] == "failed"]
        assert code == 1 and causes, text
        assert all(cause.startswith(("timed out after", "no time was left")) for cause in causes), text
        print(f"gpu-check on {results['device']}: all parts, a time limit, three devices that are missing")


if __name__ == "__main__":
    main(sys.argv[1])
