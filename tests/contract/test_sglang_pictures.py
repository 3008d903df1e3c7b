"""A training run of an image-text model by the command line, with a real SGLang server on the CPU.

SGLang's processor makes the picture's tokens on its side, the learner's on ours. At a lag of 0
`behave_imp_weight` is 1 up to rounding only if both see the same tokens and the same pictures, and
if the server has the learner's weights of each step.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.contract.test_sglang_runs import UPDATE, check, check_once, finished, started
from tests.image_text import make_image_text_model
from tests.shared import sglang_device, sglang_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# |behave_imp_weight - 1| of any token and of the mean over a batch, in float32; Triton's products on a GPU are of TF32.
# A pixel that one side rounds in another way changes log-probs by 1e-3.
NOISE, MEAN_NOISE = (1e-4, 1e-5) if sglang_device() == "cpu" else (0.1, 1e-2)
PICTURES = {
    "allocation_mode": "sglang:d1|fsdp:d1",
    "actor.dtype": "float32",
    "actor.optimizer.lr": 1e-2,
    "actor.optimizer.lr_scheduler_type": "constant",
    "actor.ppo_n_minibatches": 1,
    "rollout.max_head_offpolicyness": 0,
    "total_train_steps": 4,
    "train_dataset.path": "task:count_objects",
    "train_dataset.type": "task",
    "train_dataset.batch_size": 4,
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 12,
    "reward.name": "tests.contract.sglang_reward:reward",
    "sglang.dtype": "float32",
    "sglang.context_length": 512,
    "sglang.enable_multimodal": True,
    "sglang.extra_args": ("--model-impl", "transformers", "--max-total-tokens", "4096", "--max-running-requests", "16"),
    "evaluator.freq_steps": None,
    "saver.freq_steps": None,
}


def test_server_and_learner_see_the_same_pictures(tmp_path):
    if subprocess.run([sglang_python(), "-c", "import torchvision.io"], capture_output=True).returncode:
        pytest.skip("left out: SGLang's interpreter has no torchvision (RLJAX_SGLANG_PYTHON names another)")
    model = make_image_text_model(tmp_path / "model", hidden_size=64)  # heads of 16: Triton's kernels take none smaller
    lines = finished(started(tmp_path, "base", PICTURES | {"actor.path": model}), tmp_path)
    check(lines, 4, lag=0)
    check_once(tmp_path, 4, 4, 4)
    for ends, bound in ((("min", "max"), NOISE), (("avg",), MEAN_NOISE)):
        weights = [line[f"{UPDATE}/behave_imp_weight/{end}"] for line in lines for end in ends]
        assert max(abs(weight - 1) for weight in weights) < bound, weights
