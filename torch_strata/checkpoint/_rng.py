"""The state of this process's random number generators as tensors and numbers, which load without pickled classes."""

import random
import sys
from typing import Any

import torch

__all__ = ["RNG_KEY", "capture_rng", "restore_rng"]

# Below this key of a saved state each rank's generators lie under its number.
RNG_KEY = "strata_rng"


def capture_rng() -> dict[str, Any]:
    """torch's, Python's, NumPy's if it was imported, and that of every CUDA device that is in use.

    Python's and NumPy's global generators are Mersenne twisters: words as int64, then what else they hold.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        if name == "MT19937":  # what np.random.seed and the legacy functions use; nobody can set another
            state["numpy"] = {
                "words": torch.from_numpy(keys.astype("int64")),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = {str(device): rng for device, rng in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Continue with what `capture_rng` found; devices that are not here are passed over."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in state:
        held = state["numpy"]
        words = held["words"].numpy().astype("uint32")
        numpy.random.set_state(("MT19937", words, held["position"], held["has_gauss"], held["cached"]))
    if torch.cuda.is_available():
        for device, rng in state.get("cuda", {}).items():
            if int(device) < torch.cuda.device_count():
                torch.cuda.set_rng_state(rng, int(device))
