"""Run a module as `python -m` does; `ms-profile run` takes a script.

Run it: ms-profile run --train-script module.py --output-dir DIR -- ms_align sft RUN.toml
"""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
