"""Run under torchrun by test_distributed.py: train and decode with the named scripts, write the losses rank 0 saw.

    torchrun --nproc-per-node 2 tests/distributed_worker.py LOSSES.json SCRIPT FLAG ... -- SCRIPT FLAG ...
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(target, *rest):
    groups, losses = [[]], {}
    for word in rest:
        groups.append([]) if word == "--" else groups[-1].append(word)
    if "RANK" in os.environ:  # one process group for all scripts: a second one in the same process would hang
        dist.init_process_group("gloo")
        close, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    Path(target).with_suffix(".begun").touch()  # from here on a failure is the script's
    for name, *flags in groups:
        script = importlib.import_module(name)
        fit = script.fit

        def recorded(model, tokenizer, stage, *args):
            found = fit(model, tokenizer, stage, *args)
            losses.setdefault(name, []).extend(found)
            return found

        script.fit = recorded
        if status := script.main(flags):
            sys.exit(status)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(target).write_text(json.dumps(losses))
    if "RANK" in os.environ:
        close()


if __name__ == "__main__":
    main(*sys.argv[1:])
