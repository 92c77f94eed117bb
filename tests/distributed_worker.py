"""Run by test_distributed.py: the named scripts one after the other, in one process group; the losses as JSON.

    torchrun --nproc-per-node 2 tests/distributed_worker.py LOSSES.json SCRIPT FLAG ... -- SCRIPT FLAG ...
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Killed(BaseException):
    """Stands for kill -9: no code of ours handles it."""


def killed_after(save):
    def saved(*args):
        save(*args)
        raise Killed

    return saved


def main(target, *rest):
    groups, losses = [[]], {}
    for word in rest:
        groups.append([]) if word == "--" else groups[-1].append(word)
    if "RANK" in os.environ:  # one group for all scripts: a second one in the same process would hang
        dist.init_process_group("gloo")
        close, dist.destroy_process_group = dist.destroy_process_group, lambda: None
        dist.init_process_group = lambda *args, **settings: None
    Path(target).with_suffix(".begun").touch()  # from here on a failure is the script's
    for name, *flags in groups:
        script = importlib.import_module(name)
        fit = script.fit

        def recorded(*args):
            found = fit(*args)
            losses.setdefault(name, []).extend(found)
            return found

        script.fit = recorded
        if "STOP_AFTER_SAVE" in os.environ:
            script.save = killed_after(script.save)
        try:
            status = script.main(flags)
        except Killed:
            status = 0
        if status:
            sys.exit(status)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(target).write_text(json.dumps(losses))
    if "RANK" in os.environ:
        close()


if __name__ == "__main__":
    main(*sys.argv[1:])
