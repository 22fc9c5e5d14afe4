"""Runs a script as if Accelerate sharded models on CPUs, which it does on accelerators only: on_cpu.py SCRIPT ...

What is shimmed is which kind of training Accelerate says this is; wrapping, saving and loading are its own.
"""

import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_original = AcceleratorState.__init__


def _init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


AcceleratorState.__init__ = _init
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
