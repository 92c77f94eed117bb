"""Run by test_distributed.py: the named scripts one after the other, in one process group.

    torchrun --nproc-per-node 2 tests/distributed_worker.py LOSSES.json SCRIPT FLAG ... -- SCRIPT FLAG ...

The losses of each run are written as JSON. COPY=1: what --out holds after the first save is copied to OUT-copy.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def copying(save):
    def saved(part, tokenizer, optimizer, step, cfg):
        save(part, tokenizer, optimizer, step, cfg)
        if not Path(f"{cfg.out}-copy").exists():
            shutil.copytree(cfg.out, f"{cfg.out}-copy")

    return saved


def main(target, *rest):
    groups, losses = [[]], []
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
        save = script.save
        script.fit = lambda *args: losses.append(fit(*args))
        script.save = copying(save) if "COPY" in os.environ else save
        status = script.main(flags)
        script.fit = fit
        script.save = save
        if status:
            sys.exit(status)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(target).write_text(json.dumps(losses))
    if "RANK" in os.environ:
        close()


if __name__ == "__main__":
    main(*sys.argv[1:])
