"""Small programs in many styles, faulty and legal: what each of them is to be accused of.

A case is a comment, ``# NAME: RULE`` or ``# NAME: legal``, and the program below it, which is never run. What lint
misses on purpose, because it could not be told from a legal program, says ``missed`` before the rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROGRAMS = """
# save_and_barrier_on_rank_0: rank-branch
import torch, torch.distributed as dist
def save(model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
        dist.barrier()

# barrier_after_saving: legal
import torch, torch.distributed as dist
def save(model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()

# imported_by_name: rank-branch
from torch.distributed import all_reduce, get_rank
def log(loss):
    rank = get_rank()
    if rank == 0:
        all_reduce(loss)
        print(loss)

# imported_in_the_function: rank-branch
def log(loss, rank):
    import torch.distributed as td
    if not rank:
        td.all_reduce(loss)

# full_name: rank-branch
import torch
def log(loss):
    if torch.distributed.get_rank() == 0:
        torch.distributed.all_reduce(loss)

# rank_of_environment: rank-branch
import os
import torch.distributed as dist
def main():
    if os.environ["RANK"] == "0":
        dist.barrier()

# rank_of_environ_get: rank-branch
import os
import torch.distributed as dist
local = int(os.environ.get("LOCAL_RANK", 0))
if local == 0:
    dist.barrier()

# flag_in_a_variable: rank-branch
import torch.distributed as dist
def step(loss):
    is_first = dist.get_rank() == 0
    if is_first and loss is not None:
        dist.all_reduce(loss)

# flag_set_in_a_branch: rank-branch
import torch.distributed as dist
def step(loss):
    chosen = False
    if dist.get_rank() == 0:
        chosen = True
    if chosen:
        dist.all_reduce(loss)

# helper_of_the_file: rank-branch
import torch.distributed as dist
def mean(x):
    if not dist.is_initialized():
        return x
    dist.all_reduce(x)
    return x / dist.get_world_size()
def report(loss):
    if dist.get_rank() == 0:
        print(mean(loss))

# helper_of_a_helper: rank-branch
import torch.distributed as dist
def total(x):
    dist.all_reduce(x)
    return x
def mean(x):
    return total(x) / dist.get_world_size()
def report(loss, rank):
    if rank == 0:
        print(mean(loss))

# method_of_the_class: rank-branch
import torch.distributed as dist
class Trainer:
    def sync(self, x):
        dist.all_reduce(x)
        return x
    def report(self, loss):
        if self.rank == 0:
            print(self.sync(loss))

# method_of_a_base: rank-branch
import torch.distributed as dist
class Base:
    def sync(self):
        dist.barrier()
class Trainer(Base):
    def save(self):
        if self.is_main_process:
            self.sync()

# conditional_expression: rank-branch
import torch.distributed as dist
def total(x):
    return dist.all_reduce(x) if dist.get_rank() == 0 else x

# short_circuit: rank-branch
import torch.distributed as dist
def check(x):
    dist.get_rank() == 0 and dist.all_reduce(x)

# one_more_in_a_branch: rank-branch
import torch.distributed as dist
def both(x, y, rank):
    if rank == 0:
        dist.all_reduce(x)
        dist.all_reduce(y)
        dist.barrier()
    else:
        dist.all_reduce(x)
        dist.all_reduce(y)

# other_operation: rank-branch
import torch.distributed as dist
def both(x, rank):
    if rank == 0:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)

# rank_decorator: rank-branch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
@rank_zero_only
def save(path):
    dist.barrier()

# new_group_of_members: rank-branch
import torch.distributed as dist
def make(rank):
    if rank < 2:
        return dist.new_group([0, 1])

# shards_of_a_rank: rank-branch
import torch.distributed as dist
def evaluate(files, rank, world_size):
    for file in files[rank::world_size]:
        dist.all_reduce(score(file))

# range_of_a_rank: rank-branch
import torch.distributed as dist
def evaluate(n):
    for i in range(dist.get_rank(), n, dist.get_world_size()):
        dist.all_gather_object([None] * 2, i)

# accelerate_gather: rank-branch
from accelerate import Accelerator
def main():
    accelerator = Accelerator()
    if accelerator.is_main_process:
        print(accelerator.gather(loss).mean())

# accelerate_wait: rank-branch
from accelerate import Accelerator
accelerator = Accelerator()
def save(model):
    if accelerator.is_local_main_process:
        model.save("x")
        accelerator.wait_for_everyone()

# accelerate_first: rank-branch
def load(accelerator):
    with accelerator.main_process_first():
        data = prepare()
        accelerator.wait_for_everyone()

# accelerate_function: rank-branch
from accelerate.utils import gather_object
def main(state, texts):
    if state.is_main_process:
        texts = gather_object(texts)

# lightning_sync_dist: rank-branch
import lightning as L
class Model(L.LightningModule):
    def validation_step(self, batch, index):
        loss = self(batch)
        if self.trainer.is_global_zero:
            self.log("val", loss, sync_dist=True)

# lightning_all_gather: rank-branch
import pytorch_lightning as pl
class Model(pl.LightningModule):
    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            scores = self.all_gather(self.scores)

# lightning_checkpoint: rank-branch
import lightning
def save(trainer):
    if trainer.global_rank == 0:
        trainer.save_checkpoint("last.ckpt")

# torchmetrics_compute: rank-branch
import torchmetrics
class Evaluator:
    def __init__(self):
        self.accuracy = torchmetrics.Accuracy("binary")
    def end(self, rank):
        if rank == 0:
            print(self.accuracy.compute())

# ddpstats_reduce: rank-branch
import ddpstats
def log(stats, rank):
    if rank == 0:
        print(ddpstats.reduce_stats(stats).flat)

# ddpstats_window: rank-branch
from ddpstats import StatsWindow
class Loop:
    def __init__(self):
        self.window = StatsWindow()
    def log(self):
        if self.is_main_process:
            print(self.window.flush())

# horovod: rank-branch
import horovod.torch as hvd
def log(loss):
    if hvd.rank() == 0:
        print(hvd.allreduce(loss))

# xla: rank-branch
import torch_xla.core.xla_model as xm
def save(model):
    if xm.is_master_ordinal() or xm.get_ordinal() == 0:
        xm.rendezvous("saved")

# detectron2: rank-branch
from detectron2.utils import comm
def evaluate(results):
    if comm.is_main_process():
        comm.synchronize()

# mmengine: rank-branch
from mmengine.dist import barrier, is_main_process
def save():
    if is_main_process():
        barrier()

# wrapper_module: rank-branch
from myproject.utils import dist_utils
def save(args):
    if args.rank == 0:
        dist_utils.barrier()

# model_wrapped_on_one: rank-branch
from torch.nn.parallel import DistributedDataParallel as DDP
def wrap(model, rank):
    if rank == 0:
        model = DDP(model)
    return model

# match_statement: rank-branch
import torch.distributed as dist
def go(x):
    match dist.get_rank():
        case 0:
            dist.all_reduce(x)

# helper_of_another_file: missed rank-branch
from .helpers import average
def report(loss, rank):
    if rank == 0:
        average(loss)

# group_method: missed rank-branch
import torch.distributed as dist
def go(x, rank):
    if rank == 0:
        dist.group.WORLD.allreduce([x]).wait()

# functools_partial: missed rank-branch
import functools
import torch.distributed as dist
reduce_max = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX)
def go(x, rank):
    if rank == 0:
        reduce_max(x)

# nan_before_all_reduce: data-branch
import torch, torch.distributed as dist
def step(loss):
    if not torch.isnan(loss):
        dist.all_reduce(loss)

# loss_above: data-branch
import torch.distributed as dist
def step(model, batch):
    loss = model(batch).mean()
    if loss > 10:
        dist.all_reduce(loss)

# given_loss_above: missed data-branch
import torch.distributed as dist
def step(loss):
    if loss > 10:
        dist.all_reduce(loss)

# item_of_output: data-branch
import torch.distributed as dist
def step(outputs):
    score = outputs.item()
    if score > 0.5:
        dist.barrier()

# key_in_stats: data-branch
import torch.distributed as dist
def log(stats):
    if "acc" in stats:
        dist.all_reduce(stats["acc"])

# empty_batch: data-branch
import torch.distributed as dist
def log(batch, total):
    if len(batch) > 0:
        dist.all_reduce(total)

# no_predictions: data-branch
import torch.distributed as dist
def gather(self):
    if len(self.predictions):
        dist.all_gather_object([None] * 2, self.predictions)

# clock: data-branch
import time
import torch.distributed as dist
def loop(started, limit):
    while True:
        train()
        if time.time() - started > limit:
            dist.barrier()

# file_system: data-branch
import os
import torch.distributed as dist
def prepare(path, rank):
    if not os.path.exists(path):
        if rank == 0:
            build(path)
        dist.barrier()

# path_object: data-branch
import torch.distributed as dist
from pathlib import Path
def prepare(rank):
    cache = Path("cache.pt")
    if not cache.exists():
        if rank == 0:
            build(cache)
        dist.barrier()

# while_loss: data-branch
import torch, torch.distributed as dist
def fit(loss, grad):
    while loss > 1e-3:
        loss = step()
        dist.all_reduce(grad)

# reduce_stats_under_a_key: data-branch
from ddpstats import reduce_stats
def log(metrics):
    if "wer" in metrics:
        reduce_stats({"wer": metrics["wer"]})

# reduce_stats_under_a_name: missed data-branch
from ddpstats import reduce_stats
def log(stats, metrics):
    if "wer" in metrics:
        reduce_stats(stats)

# lightning_key: data-branch
from lightning.pytorch import LightningModule
class Model(LightningModule):
    def training_step(self, batch, index):
        losses = self(batch)
        if "aux" in losses:
            self.log("aux", losses["aux"], sync_dist=True)
        return losses["main"]

# finite_before_backward: data-branch
import torch
from torch.nn.parallel import DistributedDataParallel
def train(model, loader):
    model = DistributedDataParallel(model)
    for batch in loader:
        loss = model(batch)
        if torch.isfinite(loss):
            loss.backward()

# helper_under_nan: data-branch
import math
import torch.distributed as dist
def average(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()
def step(loss):
    value = loss.item()
    if not math.isnan(value):
        return average(loss)

# masks_that_are_there: data-branch
import torch.distributed as dist
def loss_of(masks, num_boxes):
    if masks.numel() > 0:
        dist.all_reduce(num_boxes)

# own_random_number: missed data-branch
import random
import torch.distributed as dist
def step(x):
    if random.random() < 0.1:
        dist.all_reduce(x)

# signal: missed data-branch
import torch.distributed as dist
def step(self):
    if self.interrupted:
        dist.barrier()

# return_of_other_ranks: early-exit
import torch, torch.distributed as dist
def save(model, rank):
    if rank != 0:
        return
    torch.save(model, "x")
    dist.barrier()

# continue_at_nan: early-exit
import torch, torch.distributed as dist
def train(loader, model):
    for batch in loader:
        loss = model(batch)
        if torch.isnan(loss).any():
            continue
        dist.all_reduce(loss)

# continue_before_ddp_backward: early-exit
import math
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, loader, optimizer):
    net = DDP(net)
    for x, y in loader:
        loss = criterion(net(x), y)
        if not math.isfinite(loss.item()):
            print("skipping")
            continue
        loss.backward()
        optimizer.step()

# break_at_time: early-exit
import time
import torch.distributed as dist
def train(loader, limit):
    start = time.time()
    for batch in loader:
        dist.all_reduce(step(batch))
        elapsed = time.time() - start
        if elapsed > limit:
            break

# break_at_loss: early-exit
import torch.distributed as dist
def fit(x):
    while True:
        loss = closure(x)
        if loss < 1e-4:
            break
        dist.all_reduce(x)

# return_of_empty_results: early-exit
import torch.distributed as dist
def collect(results):
    if not len(results):
        return []
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    return gathered

# skipped_batch: early-exit
import torch.distributed as dist
def train(loader):
    for batch in loader:
        if batch is None:
            continue
        dist.all_reduce(step(batch))

# continue_after_out_of_memory: early-exit
import torch, torch.distributed as dist
def train(loader, model, grads):
    for batch in loader:
        try:
            loss = model(batch)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        dist.all_reduce(grads)

# continue_after_any_error: early-exit
import torch.distributed as dist
def evaluate(files, total):
    for file in files:
        try:
            score = wer(read(file))
        except Exception as error:
            print(error)
            continue
        total += score
        dist.all_reduce(total)

# return_after_error: early-exit
import json
import torch.distributed as dist
def load(path):
    try:
        config = json.load(open(path))
    except (OSError, ValueError):
        return None
    dist.barrier()
    return config

# cache_is_there: early-exit
import os
import torch.distributed as dist
def prepare(path, rank):
    if os.path.isfile(path):
        return load(path)
    if rank == 0:
        build(path)
    dist.barrier()
    return load(path)

# return_of_a_failed_request: early-exit
import requests
import torch.distributed as dist
def sync(accelerator, url):
    if accelerator.is_main_process:
        answer = requests.post(url)
        if answer.status_code != 200:
            return
    dist.barrier()

# accelerate_continue: early-exit
import torch
def train(accelerator, loader, model):
    for batch in loader:
        loss = model(**batch).loss
        if torch.isnan(loss):
            continue
        accelerator.backward(loss)

# nested_in_configuration: early-exit
import torch, torch.distributed as dist
def step(loss, args):
    if args.check:
        if torch.isinf(loss):
            return None
    dist.all_reduce(loss)

# early_stop_of_own_loss: early-exit
import torch.distributed as dist
def train(loader):
    best = 1e9
    for batch in loader:
        dist.barrier()
        loss = step(batch)
        if loss > best:
            break

# caught_between: swallowed-error
import torch.distributed as dist
def evaluate(model, batch):
    try:
        score = model.evaluate(batch)
        dist.all_reduce(score)
    except Exception as error:
        print("skipped", error)

# caught_bare: swallowed-error
import torch.distributed as dist
def step(model, batch):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
        return loss
    except:
        return None

# caught_in_a_loop: swallowed-error
import torch.distributed as dist
def train(loader, model):
    for batch in loader:
        try:
            loss = model(batch)
            dist.all_reduce(loss)
        except RuntimeError as error:
            if "out of memory" in str(error):
                print("OOM")

# caught_key: swallowed-error
import torch.distributed as dist
def log(stats):
    try:
        value = compute(stats)
        dist.all_reduce(value)
    except KeyError:
        pass

# loss_dict_items: dict-order
import torch.distributed as dist
def reduce_losses(losses):
    for name, loss in losses.items():
        dist.all_reduce(loss)
        losses[name] = loss / dist.get_world_size()

# comprehension: dict-order
import torch.distributed as dist
def mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()
def log(metrics):
    return {k: mean(v) for k, v in metrics.items()}

# keys_of_stats: dict-order
import torch.distributed as dist
def log(stats):
    for key in stats:
        dist.all_reduce(stats[key])

# recursion: dict-order
import torch, torch.distributed as dist
def recursive_sum(obj, distributed=False):
    if isinstance(obj, dict):
        return {k: recursive_sum(v, distributed) for k, v in obj.items()}
    if distributed:
        dist.all_reduce(obj)
    return obj

# parameter: dict-order
import torch.distributed as dist
def average(input_dict):
    for value in input_dict.values():
        dist.all_reduce(value)

# set_of_names: dict-order
import torch.distributed as dist
def log(table, names):
    for name in set(names):
        dist.all_reduce(table[name])

# keys_that_come: dict-order
import torch, torch.distributed as dist
def epoch(loader):
    totals = {}
    for batch in loader:
        totals[batch["domain"]] = torch.zeros(1)
    for value in totals.values():
        dist.all_reduce(value)

# lightning_log_loop: missed dict-order
import lightning as L
class Model(L.LightningModule):
    def validation_step(self, batch, index):
        metrics = self.evaluate(batch)
        for name, value in metrics.items():
            self.log(name, value, sync_dist=True)

# accelerate_loop: dict-order
def log(accelerator, metrics):
    return {k: accelerator.gather(v).mean() for k, v in metrics.items()}

# list_of_items: dict-order
import torch.distributed as dist
def log(results):
    for index, (name, value) in enumerate(list(results.items())):
        dist.all_reduce(value)

# second_name: aliased-reduce
import torch.distributed as dist
def step(loss):
    total = loss
    dist.all_reduce(total)
    print("local", loss.item(), "total", total.item())

# detached: aliased-reduce
import torch.distributed as dist
def step(loss, history):
    shown = loss.detach()
    dist.all_reduce(shown)
    history.append(loss.item())
    print(shown)

# helper_in_place: aliased-reduce
import torch.distributed as dist
def reduce_mean(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
def train(loss, total):
    mean = reduce_mean(loss)
    total += loss.item()

# mean_of_a_list: mean-of-means
import torch, torch.distributed as dist
def evaluate(losses):
    mean = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return mean

# accuracy_avg: mean-of-means
import torch.distributed as dist
def evaluate(correct, total):
    accuracy = correct / total
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
    return accuracy

# numpy_mean: mean-of-means
import numpy as np
import torch, torch.distributed as dist
def evaluate(scores, world_size):
    mean = torch.tensor(np.mean(scores))
    dist.all_reduce(mean)
    return mean / world_size

# only_if_initialized: legal
import torch.distributed as dist
def mean(x):
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x)
        x = x / dist.get_world_size()
    return x

# only_if_there_are_others: legal
import torch.distributed as dist
def mean(x, world_size):
    if world_size > 1:
        dist.all_reduce(x)
    return x

# return_if_alone: legal
import torch.distributed as dist
def mean(x):
    if dist.get_world_size() == 1:
        return x
    dist.all_reduce(x)
    return x

# not_distributed_by_minus_one: legal
import torch.distributed as dist
def main(args):
    if args.local_rank != -1:
        dist.barrier()

# not_distributed_by_none: legal
import torch.distributed as dist
def main(rank=None):
    if rank is not None:
        dist.barrier()

# rank_zero_first: legal
import torch.distributed as dist
def load(rank):
    if rank != 0:
        dist.barrier()
    data = prepare()
    if rank == 0:
        dist.barrier()
    return data

# rank_zero_first_manager: legal
import contextlib
import torch.distributed as dist
@contextlib.contextmanager
def zero_first(local_rank):
    if local_rank not in [-1, 0]:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()
def load(local_rank):
    with zero_first(local_rank):
        return prepare()

# both_branches_broadcast: legal
import torch.distributed as dist
def share(rank, shape):
    if rank == 0:
        data = read()
        dist.broadcast(data, src=0)
    else:
        data = empty(shape)
        dist.broadcast(data, src=0)
    return data

# branch_that_returns: legal
import torch.distributed as dist
def share(rank, names):
    if rank == 0:
        names = [listing()]
        dist.broadcast_object_list(names)
        return names
    dist.broadcast_object_list(names)
    return names

# gather_on_both_sides: legal
import torch.distributed as dist
def collect(x, rank):
    if rank == 0:
        out = [None] * 2
        dist.gather_object(x, out)
        return out
    else:
        dist.gather_object(x)
        return None

# argument_by_rank: legal
import torch.distributed as dist
def collect(x, rank):
    out = [None] * 2 if rank == 0 else None
    dist.gather_object(x, out, dst=0)
    return out

# point_to_point: legal
import torch.distributed as dist
def pass_on(x, rank):
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)

# group_of_the_branch: legal
import torch.distributed as dist
def sync(x, rank, evens):
    if rank % 2 == 0:
        dist.all_reduce(x, group=evens)

# group_by_position: legal
import torch.distributed as dist
def sync(x, rank, evens):
    if rank % 2 == 0:
        dist.all_reduce(x, dist.ReduceOp.SUM, evens)

# group_through_a_helper: legal
import torch.distributed as dist
def mean(x=None, /, group=None, *, scale=1):
    dist.all_reduce(x, group=group)
    return x
def sync(x, rank, evens):
    if rank % 2 == 0:
        mean(x, group=evens)

# local_group: legal
import torch.distributed as dist
def make(rank):
    if rank < 2:
        return dist.new_group([0, 1], use_local_synchronization=True)

# flag_agreed: legal
import torch, torch.distributed as dist
def step(loss, grads):
    bad = torch.isnan(loss).float()
    dist.all_reduce(bad)
    if bad.item() > 0:
        return
    dist.all_reduce(grads)

# flag_broadcast: legal
import torch, torch.distributed as dist
def loop(loader, rank):
    stop = torch.zeros(1)
    for batch in loader:
        if rank == 0 and decide(batch):
            stop.fill_(1)
        dist.broadcast(stop, 0)
        if stop.item():
            break
        dist.all_reduce(step(batch))

# espnet_iterator_stop: legal
import torch
def train(loader, model, distributed):
    iterator_stop = torch.tensor(0)
    for batch in loader:
        if distributed:
            torch.distributed.all_reduce(iterator_stop)
            if iterator_stop > 0:
                break
        model(batch)
    else:
        if distributed:
            iterator_stop.fill_(1)
            torch.distributed.all_reduce(iterator_stop)

# any_rank: legal
import torch
import torch.distributed as dist
from ddpstats import any_rank
def step(loss, grads):
    if any_rank(torch.isnan(loss)):
        return
    dist.all_reduce(grads)

# result_of_a_helper: legal
import torch, torch.distributed as dist
def all_mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()
def loop(loader):
    for batch in loader:
        loss = all_mean(step(batch))
        if loss > 10:
            break

# imported_helper_by_its_name: legal
import torch.distributed as dist
from utils import reduce_loss
def loop(loader):
    for batch in loader:
        loss = reduce_loss(step(batch))
        if loss > 10:
            break
        dist.barrier()

# strategy_decides: legal
import lightning
class Stop(lightning.Callback):
    def on_validation_end(self, trainer, module):
        stop = trainer.callback_metrics["loss"] > 3
        stop = trainer.strategy.reduce_boolean_decision(stop)
        if stop:
            trainer.strategy.barrier()

# configuration: legal
import torch.distributed as dist
def step(x, args, config):
    if args.sync and config["mode"] == "sum" and isinstance(x, tuple):
        dist.all_reduce(x[0])

# every_hundred_steps: legal
import torch.distributed as dist
def step(x, step_index):
    if step_index % 100 == 0:
        dist.all_reduce(x)

# logging_on_rank_0: legal
import torch.distributed as dist
def log(loss, rank):
    dist.all_reduce(loss)
    if rank == 0:
        print(loss.item())

# other_ranks_return_last: legal
import torch, torch.distributed as dist
def save(model, rank):
    dist.barrier()
    if rank != 0:
        return
    torch.save(model, "x")

# error_of_one_rank: legal
import torch, torch.distributed as dist
def step(loss, grads):
    if torch.isnan(loss):
        raise FloatingPointError("loss is NaN")
    dist.all_reduce(grads)

# exit_of_one_rank: legal
import math, sys
import torch.distributed as dist
def step(loss, grads):
    if not math.isfinite(loss.item()):
        print("loss is", loss)
        sys.exit(1)
    dist.all_reduce(grads)

# gradients_are_alike: legal
import torch, torch.distributed as dist
def step(model, optimizer, max_norm):
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not torch.isfinite(grad_norm):
        return
    optimizer.step()
    dist.barrier()

# parameters_are_alike: legal
import torch, torch.distributed as dist
def check(model):
    if any(torch.isnan(p).any() for p in model.parameters()):
        return
    dist.barrier()

# parameters_in_order: legal
import torch.distributed as dist
def sync(model):
    for name, value in model.state_dict().items():
        dist.broadcast(value, 0)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

# sorted_keys: legal
import torch.distributed as dist
def log(stats):
    for key in sorted(stats):
        dist.all_reduce(stats[key])
    for key, value in sorted(stats.items()):
        dist.all_reduce(value)

# dict_of_the_text: legal
import torch.distributed as dist
def log(loss, correct):
    stats = {"loss": loss, "correct": correct}
    for value in stats.values():
        dist.all_reduce(value)

# dict_handed_by_the_text: legal
import torch.distributed as dist
def reduce_all(stats):
    return {key: total(value) for key, value in stats.items()}
def total(x):
    dist.all_reduce(x)
    return x
def main(loss, correct):
    stats = {"loss": loss}
    stats["correct"] = correct
    print(reduce_all(stats))

# stacked_values: legal
import torch, torch.distributed as dist
def log(stats):
    names = sorted(stats)
    values = torch.stack([stats[name] for name in names])
    dist.all_reduce(values)
    return dict(zip(names, values))

# one_call_for_all: legal
import ddpstats
def log(stats):
    return ddpstats.reduce_stats(stats)

# caught_import: legal
import torch.distributed as dist
def main():
    try:
        import apex
        apex.initialize()
        dist.barrier()
    except ImportError:
        pass

# caught_and_raised: legal
import torch.distributed as dist
def step(model, batch):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except RuntimeError:
        print("failed at", batch)
        raise

# caught_before: legal
import torch, torch.distributed as dist
def step(model, batch):
    try:
        loss = model(batch)
    except RuntimeError:
        loss = torch.zeros(())
    dist.all_reduce(loss)

# flag_after_error: legal
import torch, torch.distributed as dist
def step(model, batch):
    failed = torch.zeros(1)
    try:
        loss = model(batch)
    except RuntimeError:
        failed += 1
    dist.all_reduce(failed)
    if failed.item() > 0:
        return None
    dist.all_reduce(loss)
    return loss

# end_of_iterator: legal
import torch.distributed as dist
def train(loader):
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        dist.all_reduce(step(batch))

# copy_is_reduced: legal
import torch.distributed as dist
def step(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(loss.item(), total.item())

# view_is_reduced: legal
import torch.distributed as dist
def sync(grad):
    flat = grad.view(-1)
    dist.all_reduce(flat)
    grad /= dist.get_world_size()

# backward_reads_no_value: legal
import torch.distributed as dist
def step(loss):
    shown = loss.detach()
    dist.all_reduce(shown)
    loss.backward()
    return shown

# helper_keeps_its_argument: legal
import torch.distributed as dist
def reduce_mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
def train(loss):
    mean = reduce_mean(loss)
    print(loss.item(), mean)

# result_under_its_name: legal
import torch.distributed as dist
def reduce_mean(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
def train(loss):
    loss = reduce_mean(loss)
    print(loss.item())

# sums_and_counts: legal
import torch, torch.distributed as dist
def evaluate(losses):
    both = torch.tensor([sum(losses), len(losses)])
    dist.all_reduce(both)
    return both[0] / both[1]

# count_is_reduced_too: legal
import torch.distributed as dist
def evaluate(correct, total):
    dist.all_reduce(correct)
    dist.all_reduce(total)
    accuracy = correct / total
    return accuracy

# sum_over_ranks: legal
import torch, torch.distributed as dist
def evaluate(losses):
    mean = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return mean

# loop_over_ranks: legal
import torch.distributed as dist
def share(tensors, world_size):
    for rank in range(world_size):
        if rank == 0:
            print("first")
        dist.broadcast(tensors[rank], src=rank)
    for rank in range(world_size):
        if rank > 0:
            dist.barrier()

# equal_parts: legal
import torch.distributed as dist
def evaluate(files, rank, per_rank):
    for file in files[rank * per_rank : (rank + 1) * per_rank]:
        dist.all_reduce(score(file))
    for i in range(rank * per_rank, (rank + 1) * per_rank):
        dist.all_reduce(score(files[i]))

# lora_rank: legal
import torch.distributed as dist
def merge(lora_rank, low_rank, x):
    if lora_rank > 0 and low_rank:
        dist.all_reduce(x)

# lightning_log_without_sync: legal
import lightning as L
class Model(L.LightningModule):
    def validation_step(self, batch, index):
        loss = self(batch)
        if self.global_rank == 0:
            self.log("val", loss, rank_zero_only=True)
            self.log("val2", loss)

# own_log: legal
import logging
log = logging.getLogger()
def main(rank, comm):
    if rank == 0:
        log.info("x")
        print(sum([1]))
        import functools
        functools.reduce(max, [1, 2])

# other_gather: legal
import asyncio
import torch
async def main(rank, x, index):
    if rank == 0:
        await asyncio.gather(x)
        torch.gather(x, 0, index)
        x.scatter_(0, index, x)

# torch_save: legal
import torch
import torch.distributed as dist
def main(model, rank):
    if rank == 0:
        torch.save(model, "x")
        torch.load("x")
    dist.barrier()

# no_process_group: legal
import threading
def main(rank):
    barrier = threading.Barrier(2)
    if rank == 0:
        barrier.wait()

# compute_of_something: legal
import torchmetrics
def end(self, rank, simulation):
    if rank == 0:
        simulation.compute()

# metric_without_sync: legal
import torchmetrics
def end(rank):
    accuracy = torchmetrics.Accuracy("binary", sync_on_compute=False)
    if rank == 0:
        print(accuracy.compute())

# callback_on_rank_0: legal
import torch.distributed as dist
def search(study, rank, trials):
    if rank == 0:
        def objective(trial):
            dist.broadcast_object_list([trial])
        study.optimize(objective, trials)
    else:
        for _ in range(trials):
            dist.broadcast_object_list([None])

# sizes_are_gathered: legal
import torch, torch.distributed as dist
def gather(x):
    sizes = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    longest = max(int(size.item()) for size in sizes)
    if longest == 0:
        return []
    dist.all_gather(sizes, x)

# file_checked_on_rank_0: legal
import os
import torch.distributed as dist
def resume(path, rank):
    there = [os.path.exists(path) if rank == 0 else None]
    dist.broadcast_object_list(there)
    if there[0]:
        dist.barrier()

# file_of_all_ranks: legal
import os
import torch.distributed as dist
def resume(path, scores):
    if os.path.exists(path):
        return load(path)
    dist.barrier()
    return train()

# file_is_only_logged: legal
import os
import torch.distributed as dist
def load(path, rank, logger):
    if os.path.exists(path):
        if rank == 0:
            logger.info("found")
        dist.barrier()

# file_is_made_after_all_have_looked: legal
import os
import torch.distributed as dist
def prepare(path, rank, x):
    if os.path.exists(path):
        return load(path)
    dist.all_reduce(x)
    if rank == 0:
        save(x, path)
    dist.barrier()
    return x

# auxiliary_outputs_of_the_model: legal
import torch.distributed as dist
def criterion(outputs, num_boxes):
    if "aux_outputs" in outputs:
        dist.all_reduce(num_boxes)

# started_without_a_launcher: legal
import os
import torch.distributed as dist
def setup():
    try:
        rank = int(os.environ["RANK"])
        dist.init_process_group("nccl")
        dist.barrier()
        return True
    except Exception:
        print("not distributed")
        return False

# timed_stop_is_broadcast: legal
import time
import torch.distributed as dist
def train(self, loader, rank):
    while True:
        for batch in loader:
            if self.args.time:
                self.stop = time.time() - self.start > self.args.time
                if rank != -1:
                    stop = [self.stop if rank == 0 else None]
                    dist.broadcast_object_list(stop, 0)
                    self.stop = stop[0]
                if self.stop:
                    break
            dist.all_reduce(step(batch))
        if self.stop:
            break

# cast_only_if_needed: legal
import torch.distributed as dist
def reduce(tensor, dtype):
    if tensor.dtype != dtype:
        cast = tensor.to(dtype)
    else:
        cast = tensor
    dist.all_reduce(cast)
    if tensor.dtype != dtype:
        tensor.copy_(cast)
    return tensor

# checkpoint_of_a_group: legal
import torch.distributed.checkpoint as dcp
def save(state, mesh):
    if mesh.get_local_rank("replicate") == 0:
        dcp.save(state, process_group=mesh.get_group("shard"))

# experts_by_group: legal
import torch.distributed as dist
def norm_of(tensors, group):
    total = sum(tensors)
    dist.all_reduce(total, group=group)
    return total
def norms(expert_tensors, groups):
    return [norm_of(tensors, groups[name]) for name, tensors in expert_tensors.items()]

# running_metrics_of_the_text: legal
import torch.distributed as dist
def train(epochs, loader):
    for epoch in range(epochs):
        running_metrics = {"chosen": 0, "rejected": 0}
        for batch in loader:
            running_metrics["chosen"] += step(batch)
            for key in running_metrics:
                dist.all_reduce(running_metrics[key])
            running_metrics = {key: 0 for key in running_metrics}

# all_leave_under_an_agreed_condition: legal
import torch.distributed as dist
def gather(x, rank, counts):
    dist.all_reduce(counts)
    if counts.sum() == 0:
        if rank != 0:
            return None
        return []
    dist.gather(x, dst=0)

# launched_by_something: legal
import os
import torch.distributed as dist
def main():
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
        dist.barrier()
    if "RANK" in os.environ:
        dist.barrier()

# rank_and_size_at_once: legal
import torch.distributed as dist
def gather(x, mpu):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        dist.all_reduce(x)
    rank, size = info() if mpu is None else (mpu.get_rank(), mpu.get_size())
    if size > 1:
        dist.all_reduce(x)

# samples_that_were_gathered: legal
import torch.distributed as dist
def resample(samples, wanted, mask):
    valid_samples = []
    while True:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, samples)
        valid_samples.extend([s for s, good in zip(everyone, mask) if good])
        if len(valid_samples) >= wanted:
            break

# optimizer_state_in_order: legal
import torch.distributed as dist
def gather_state(state):
    for name, value in state.items():
        dist.all_reduce(value)

# gradient_accumulation: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, loader, accumulate):
    net = DDP(net)
    for i, batch in enumerate(loader):
        if (i + 1) % accumulate:
            with net.no_sync():
                net(batch).backward()
        else:
            net(batch).backward()

# loss_is_weighted: legal
import torch.distributed as dist
def loss_of(x, loss_weight, use_loss):
    if loss_weight > 0 and use_loss:
        dist.all_reduce(x)

# validation_loss_of_somewhere: legal
import torch.distributed as dist
def epoch_end(val_loss, best_loss):
    if val_loss < best_loss:
        dist.barrier()

# accelerate_first_without_collective: legal
def load(accelerator):
    with accelerator.main_process_first():
        data = prepare()
    accelerator.wait_for_everyone()
    return data

# decorator_without_collective: legal
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
@rank_zero_only
def save(path):
    open(path, "w").close()
def end():
    save("x")
    dist.barrier()

# skipped_loader_entry_on_all: legal
import torch.distributed as dist
def train(loader, start):
    for step, batch in enumerate(loader):
        if step < start:
            continue
        dist.all_reduce(run(batch))

# prefetcher_ends: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, prefetcher, optimizer):
    net = DDP(net)
    batch = prefetcher.next()
    while batch is not None:
        loss = net(batch)
        loss.backward()
        optimizer.step()
        batch = prefetcher.next()

# next_with_default: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, loader):
    net = DDP(net)
    iterator = iter(loader)
    while True:
        batch = next(iterator, None)
        if batch is None:
            break
        net(batch).backward()

# keyword_arguments_broadcast: legal
import torch
import torch.distributed as dist
def loop(loader, rank):
    for batch in loader:
        loss = step(batch)
        flag = torch.tensor(int(torch.isnan(loss)))
        dist.all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
        if flag.item():
            continue
        dist.all_reduce(loss)

# keyword_object_list: legal
import torch.distributed as dist
def loop(loader, rank):
    for batch in loader:
        stop = [rank == 0 and done(batch)]
        dist.broadcast_object_list(object_list=stop, src=0)
        if stop[0]:
            break
        dist.barrier()

# async_helper: legal
import torch.distributed as dist
def start(bucket):
    return dist.all_reduce(bucket, async_op=True)
def sync(bucket, world_size):
    handle = start(bucket)
    overlap()
    handle.wait()
    bucket.div_(world_size)

# flags_gathered_keyword: legal
import torch
import torch.distributed as dist
def step(loss, outputs):
    dist.all_gather_object(object_list=outputs, obj=loss.item())
    if len(outputs) > 1:
        dist.barrier()

# context_manager_class: legal
import torch.distributed as dist
class MainFirst:
    def __init__(self, rank):
        self.rank = rank
    def __enter__(self):
        if self.rank != 0:
            dist.barrier()
    def __exit__(self, *error):
        if self.rank == 0:
            dist.barrier()

# begin_and_end: legal
import torch.distributed as dist
def wait_for_main():
    if dist.get_rank() != 0:
        dist.barrier()
def release_others():
    if dist.get_rank() == 0:
        dist.barrier()

# crash_is_logged: legal
import logging
import torch.distributed as dist
def main(args):
    dist.init_process_group("nccl")
    try:
        model = build(args)
        dist.barrier()
        train(model)
    except Exception:
        logging.exception("training failed")
    finally:
        dist.destroy_process_group()

# crash_is_logged_with_cleanup: legal
import traceback
import torch.distributed as dist
def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()
def main(args):
    try:
        model = build(args)
        dist.barrier()
        train(model)
    except Exception:
        traceback.print_exc()
    finally:
        cleanup()

# environment_or_return: legal
import os
import torch.distributed as dist
def setup():
    try:
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
    except KeyError:
        print("not distributed")
        return False
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    dist.barrier()
    return True

# resume_file_not_found: legal
import torch
import torch.distributed as dist
def resume(path, model):
    try:
        state = torch.load(path, map_location="cpu")
    except FileNotFoundError:
        return 0
    model.load_state_dict(state["model"])
    dist.barrier()
    return state["epoch"]

# progress_bar_on_rank_0: legal
import torch.distributed as dist
from tqdm import tqdm
def train(loader, rank):
    loader = tqdm(loader) if rank == 0 else loader
    for i, batch in enumerate(loader):
        step(batch)
        if i == len(loader) - 1:
            dist.barrier()

# lora_config: legal
import torch.distributed as dist
def merge(cfg, x):
    if cfg.lora.rank > 0:
        dist.all_reduce(x)

# lora_layer: legal
import torch
import torch.distributed as dist
class LoRALinear(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
    def forward(self, x):
        if self.rank > 0:
            dist.all_reduce(x)
        return x

# rank_of_a_tensor: legal
import torch.distributed as dist
def reduce(x):
    rank = x.dim()
    if rank == 3:
        dist.all_reduce(x)
    rank = len(x.shape)
    if rank == 3:
        dist.all_reduce(x)

# rank_of_a_matrix: legal
import torch
import torch.distributed as dist
def reduce(weight):
    rank = torch.linalg.matrix_rank(weight).item()
    if rank > 8:
        dist.all_reduce(weight)

# ranks_of_a_group: legal
import torch.distributed as dist
def walk(ranks, tensors):
    for rank in ranks:
        if rank != 0:
            dist.broadcast(tensors[rank], src=rank)
    for rank, tensor in enumerate(tensors):
        if rank > 0:
            dist.broadcast(tensor, src=rank)

# metrics_of_a_function: legal
import torch.distributed as dist
def evaluate(model):
    return {"loss": run(model), "acc": score(model)}
def main(model):
    metrics = evaluate(model)
    for name, value in metrics.items():
        dist.all_reduce(value)

# totals_of_the_class: legal
import torch
import torch.distributed as dist
class Meter:
    def __init__(self):
        self.totals = {"loss": torch.zeros(1), "count": torch.zeros(1)}
    def sync(self):
        for key in self.totals:
            dist.all_reduce(self.totals[key])

# metrics_of_the_module: legal
import torch
import torch.distributed as dist
METRICS = {"loss": torch.zeros(1), "count": torch.zeros(1)}
def sync():
    for value in METRICS.values():
        dist.all_reduce(value)

# update_with_keywords: legal
import torch.distributed as dist
def log(loss, acc):
    stats = {}
    stats.update(loss=loss, acc=acc)
    stats.update({"n": 1})
    for value in stats.values():
        dist.all_reduce(value)

# dict_of_zip: legal
import torch.distributed as dist
def log(values):
    stats = dict(zip(("loss", "acc"), values))
    for value in stats.values():
        dist.all_reduce(value)

# dict_of_names: legal
import torch
import torch.distributed as dist
NAMES = ["loss", "acc"]
def log(batches):
    totals = {name: torch.zeros(1) for name in NAMES}
    for batch in batches:
        for name in NAMES:
            totals[name] += batch[name]
    for name, value in totals.items():
        dist.all_reduce(value)
    return totals

# merged_literals: legal
import torch.distributed as dist
def log(loss, acc):
    losses = {"loss": loss}
    stats = {**losses, "acc": acc}
    for value in stats.values():
        dist.all_reduce(value)

# loss_terms_in_a_list: legal
import torch.distributed as dist
def log(losses):
    if len(losses) > 1:
        dist.all_reduce(losses[1])

# tuple_batch: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, loader):
    net = DDP(net)
    for batch in loader:
        if len(batch) == 2:
            net(*batch).backward()

# drop_the_last_batch: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, loader, batch_size):
    net = DDP(net)
    for batch in loader:
        if len(batch) < batch_size:
            continue
        net(batch).backward()

# diffusers_checkpoint: legal
from accelerate import Accelerator
def main(args):
    accelerator = Accelerator()
    for step in range(args.steps):
        if accelerator.sync_gradients:
            if accelerator.is_main_process:
                if step % args.checkpointing_steps == 0:
                    accelerator.save_state(f"checkpoint-{step}")

# dcp_without_dist: legal
import torch.distributed.checkpoint as dcp
def save(state, rank):
    if rank == 0:
        dcp.save(state, checkpoint_id="x", no_dist=True)

# mpi_rows: legal
from mpi4py import MPI
comm = MPI.COMM_WORLD
def go(rank):
    row_comm = comm.Split(rank // 4)
    if rank < 4:
        row_comm.barrier()

# passed_on_arguments: legal
import torch.distributed as dist
def reduce(x, rank, **kwargs):
    if rank < 4:
        dist.all_reduce(x, **kwargs)

# other_strategy: legal
class Backtest:
    def step(self, strategy, outputs):
        if outputs.item() > 0:
            strategy.reduce(1)

# padded_shards: legal
import torch.distributed as dist
def evaluate(files, rank, world_size):
    files = files + files[: -len(files) % world_size]
    for file in files[rank::world_size]:
        dist.all_reduce(score(file))

# divisible_shards: legal
import torch.distributed as dist
def evaluate(n, rank, world_size):
    assert n % world_size == 0
    for i in range(rank, n, world_size):
        dist.all_reduce(score(i))

# evaluation_of_another_file: legal
import torch.distributed as dist
from engine import evaluate
def fit(model, loader, epochs):
    best_loss = 1e9
    for epoch in range(epochs):
        dist.barrier()
        loss = evaluate(model, loader)
        if loss < best_loss:
            best_loss = loss
        else:
            break

# average_of_another_file: legal
import torch.distributed as dist
from utils import average
def fit(loader):
    for batch in loader:
        loss = average(step(batch))
        if loss.item() > 10:
            break
        dist.barrier()

# deepspeed_pipeline: legal
import deepspeed
import torch.distributed as dist
def fit(engine, iterator, steps):
    for _ in range(steps):
        loss = engine.train_batch(data_iter=iterator)
        if loss.item() > 100:
            break
        dist.barrier()

# flat_gradient: legal
import torch.distributed as dist
def sync(flat, world_size):
    buffer = flat
    dist.all_reduce(buffer)
    flat.div_(world_size)
    unflatten(flat)

# data_of_a_parameter: legal
import torch.distributed as dist
def sync(grad, world_size):
    raw = grad.detach()
    dist.all_reduce(raw)
    grad.div_(world_size)

# equal_shards_mean: legal
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
def main(dataset, model):
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, drop_last=True), drop_last=True)
    correct, total = torch.zeros(1), 0
    for x, y in loader:
        correct += (model(x) == y).sum()
        total += len(y)
    accuracy = correct / total
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
    return accuracy

# mean_of_micro_batches: legal
import torch
import torch.distributed as dist
def step(model, micro_batches):
    losses = [model(one) for one in micro_batches]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean

# barrier_in_finally: legal
import torch.distributed as dist
def save(model, rank):
    try:
        if rank != 0:
            return
        write(model)
    finally:
        dist.barrier()

# shadowed_by_a_parameter: legal
import torch.distributed as dist
def evaluate(model):
    dist.barrier()
def main(rank, evaluate):
    if rank == 0:
        evaluate()

# losses_that_are_configured: legal
import torch.distributed as dist
class Criterion:
    def __init__(self, args):
        self.losses = args.losses
    def forward(self, num_boxes):
        if "masks" in self.losses:
            dist.all_reduce(num_boxes)

# metrics_that_are_configured: legal
import torch.distributed as dist
def evaluate(args, x):
    metrics = args.metrics.split(",")
    if "bleu" in metrics:
        dist.all_reduce(x)

# class_trainer: legal
import torch
import torch.distributed as dist
class Trainer:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.is_main = rank == 0
        self.stop = False
    def reduce(self, value):
        tensor = torch.tensor(value)
        dist.all_reduce(tensor)
        return tensor.item() / self.world_size
    def train(self, loader):
        for batch in loader:
            loss = self.step(batch)
            mean = self.reduce(loss)
            if self.is_main:
                print(mean)
            if mean > 100:
                self.stop = True
            if self.stop:
                break
        if self.stop:
            return
        dist.barrier()

# while_any_has_data: legal
import torch
import torch.distributed as dist
def go(iterator):
    has_data = torch.ones(1)
    while has_data.item() > 0:
        batch = next(iterator, None)
        has_data.fill_(batch is not None)
        dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
        if batch is not None:
            step(batch)

# ddp_join: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def train(model, batches, rank, world_size):
    model = DDP(model)
    with model.join():
        for batch in batches[rank::world_size]:
            loss = model(batch)
            loss.backward()

# pipeline_loss_broadcast: legal
import torch
import torch.distributed as dist
def run(stage, n_stages, micro, device):
    losses = []
    for x in micro:
        if stage == n_stages - 1:
            losses.append(forward(x))
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    dist.broadcast(loss, src=n_stages - 1)
    if loss.item() > 5:
        return None
    dist.barrier()
    return loss

# first_rank_writes_in_turn: legal
import torch.distributed as dist
def write(path, text, rank, size):
    for turn in range(size):
        if turn == rank:
            with open(path, "a") as file:
                file.write(text)
        dist.barrier()

# dataset_is_empty_for_all: legal
import torch.distributed as dist
def main(dataset, prompts, x):
    if len(dataset) == 0:
        return
    if len(prompts) == 0:
        return
    dist.all_reduce(x)

# chained_flag: rank-branch
import os
import torch.distributed as dist
MAIN = int(os.environ.get("RANK", "0")) == 0
def go(x):
    if MAIN:
        dist.all_reduce(x)

# flag_of_the_constructor: rank-branch
import torch.distributed as dist
class Loop:
    def __init__(self):
        self.verbose = dist.get_rank() == 0
    def go(self, x):
        if self.verbose:
            dist.all_reduce(x)

# async_on_rank_0: rank-branch
import torch.distributed as dist
def go(x, rank):
    work = None
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
    if work is not None:
        work.wait()

# gather_only_on_destination_rank: rank-branch
import torch.distributed as dist
def go(x, rank):
    if rank == 0:
        out = [None] * 2
        dist.gather_object(x, out)
        return out
    return None

# broadcast_only_by_source: rank-branch
import torch.distributed as dist
def go(x):
    if dist.get_rank() == 0:
        x = load()
        dist.broadcast(x, src=0)
    return x

# stop_flag_of_rank_0: early-exit
import torch.distributed as dist
def fit(rank, epochs):
    stop = False
    for epoch in range(epochs):
        dist.barrier()
        if rank == 0 and done():
            stop = True
        if stop:
            break

# caught_with_retry: swallowed-error
import torch.distributed as dist
def step(model, batch):
    for attempt in range(3):
        try:
            loss = model(batch)
            dist.all_reduce(loss)
            return loss
        except Exception:
            continue

# match_nan: data-branch
import torch
import torch.distributed as dist
def step(loss):
    match bool(torch.isnan(loss)):
        case False:
            dist.all_reduce(loss)

# deadline: data-branch
from time import monotonic
import torch.distributed as dist
def loop(end, x):
    while monotonic() < end:
        dist.all_reduce(x)

# set_comprehension: dict-order
import torch.distributed as dist
def log(table, rows):
    for name in {row.name for row in rows}:
        dist.all_reduce(table[name])

# rank_of_the_module: rank-branch
import os
import torch.distributed as dist
RANK = int(os.environ["RANK"])
def go(x):
    if RANK == 0:
        dist.all_reduce(x)

# flag_of_itself: legal
import torch.distributed as dist
class Loop:
    def go(self, x):
        self.ready = self.ready == self.other
        self.other = self.ready == 0
        if self.ready:
            dist.all_reduce(x)

# match_irrefutable: legal
import torch.distributed as dist
def go(x):
    match x:
        case _:
            if x:
                print(x)
            dist.all_reduce(x)

# match_rank_all: legal
import torch.distributed as dist
def go(rank, x):
    match rank:
        case 0:
            x = load()
            dist.broadcast(x, 0)
        case 1 | 2:
            dist.broadcast(x, 0)
        case _:
            dist.broadcast(x, 0)

# generator_shards: missed rank-branch
import itertools
import torch.distributed as dist
def go(files, rank, world):
    for file in itertools.islice(files, rank, None, world):
        dist.all_reduce(read(file))

# property_of_the_class: missed rank-branch
import torch.distributed as dist
class Loop:
    @property
    def main(self):
        return dist.get_rank() == 0
    def go(self, x):
        if self.main:
            dist.all_reduce(x)

# function_that_says_main: missed rank-branch
import torch.distributed as dist
def first():
    return not dist.is_initialized() or dist.get_rank() == 0
def go(x):
    if first():
        dist.all_reduce(x)

# suppress: missed swallowed-error
import contextlib
import torch.distributed as dist
def step(model, batch):
    with contextlib.suppress(RuntimeError):
        loss = model(batch)
        dist.all_reduce(loss)

# truthy_list: missed data-branch
import torch.distributed as dist
def step(results):
    if results:
        dist.all_gather_object([None] * 2, results)

# get_of_metrics: missed data-branch
import torch.distributed as dist
def log(metrics):
    if metrics.get("acc") is not None:
        dist.all_reduce(metrics["acc"])

# free_memory: missed data-branch
import torch
import torch.distributed as dist
def loop(x):
    if torch.cuda.memory_allocated() > 1e10:
        dist.all_reduce(x)

# frozenset_of_names: missed dict-order
import torch.distributed as dist
def log(table, a, b):
    for name in set(a) & set(b):
        dist.all_reduce(table[name])

# mean_of_item: missed mean-of-means
import torch
import torch.distributed as dist
def evaluate(losses):
    mean = torch.tensor(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean

# keys_of_a_literal_loop: legal
import torch.distributed as dist
def log(batch):
    stats = {}
    for key in ("loss", "acc"):
        stats[key] = batch[key].sum()
    for value in stats.values():
        dist.all_reduce(value)

# rank_of_a_subgroup_kept: legal
import os
from pathlib import Path
import torch.distributed as dist
class Checkpoints:
    def __init__(self, group):
        self.dp_rank = dist.get_rank(group)
    def save(self, path, shards):
        if os.path.isfile(path):
            return
        Path(path).mkdir(parents=True, exist_ok=True)
        if self.dp_rank != 0:
            dist.barrier()
            return
        for shard in shards:
            shard.write(path)
        dist.barrier()

# grown_by_what_was_gathered: legal
import torch, torch.distributed as dist
def sample_all(wanted, size):
    all_images = []
    while len(all_images) * size < wanted:
        images = [torch.zeros(size) for _ in range(dist.get_world_size())]
        dist.all_gather(images, sample(size))
        all_images.extend([image.cpu() for image in images])
    dist.barrier()

# set_under_the_key_of_its_own_loop: legal
import torch.distributed as dist
def evaluate(names, model):
    results = TABLE[names](model)
    for key, value in list(results.items()):
        dist.broadcast(value, src=0)
        results[key] = float(value)

# keys_of_the_data_set: legal
import collections
import torch, torch.distributed as dist
class Model:
    def evaluate(self, dataset, with_metrics):
        if with_metrics:
            self.results = {}
            folders = collections.Counter(dataset.folders)
            for folder, frames in folders.items():
                self.results[folder] = torch.zeros(frames)
        for tensor in self.results.values():
            dist.reduce(tensor, 0)

# reduced_through_its_data: legal
import torch.distributed as dist
def train(loader, model):
    for batch in loader:
        loss = model(batch)
        reduced = loss.detach().clone()
        dist.all_reduce(reduced.data)
        if reduced.isnan().any():
            return
        dist.barrier()

# members_of_a_group: legal
import torch.distributed as dist
def sync(grad, others, ends=None):
    if dist.get_rank() in dist.get_process_group_ranks(ends):
        dist.all_reduce(grad, group=ends)

# rank_or_configuration: legal
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
def save(state, sharded):
    if dist.get_rank() == 0 or sharded:
        if sharded:
            dcp.save(state, checkpoint_id="x")

# backward_of_a_profile: legal
import time
from torch.nn.parallel import DistributedDataParallel as DDP
def wrap(model):
    return DDP(model)
def profile(ops, x):
    for op in ops:
        try:
            y = op(x)
            y.sum().backward()
            print(time.time())
        except Exception:
            print("no backward")

# file_that_another_path_is_made_for: legal
import os
import torch.distributed as dist
def prepare(path, cache, rank):
    if os.path.isdir(path):
        return path
    if rank == 0:
        download(path_of(cache))
    dist.barrier()
    return path_of(cache)

# file_made_after_a_subgroup_has_met: legal
import os
import torch.distributed as dist
def precompute(paths, rank, group, x):
    for path in paths:
        if os.path.exists(path + ".idx"):
            continue
        dist.broadcast(x, 0, group=group)
        if rank == 0:
            write(path + ".idx")
        dist.barrier()

# the_first_waits_behind_the_others: legal
import contextlib
import torch.distributed as dist
@contextlib.contextmanager
def zero_first(local_rank, devices):
    if local_rank not in {-1, 0}:
        dist.barrier(device_ids=devices) if devices else dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier(device_ids=devices) if devices else dist.barrier()

# the_first_rank_tells_of_a_file: legal
import os
import torch.distributed as dist
def load(path, rank, logger, model):
    if os.path.exists(path):
        dist.broadcast(model, 0)
    elif rank == 0:
        logger.info(path)

# steps_of_a_data_set: legal
import torch.distributed as dist
def train(args, training_features, model, batches):
    if args.steps == -1:
        args.steps = int(args.epochs * len(training_features) / args.batch_size)
    if args.steps <= args.done:
        return
    for batch in batches:
        model(batch).backward()

# until_there_are_enough_samples: legal
import torch.distributed as dist
def sample(args, draw):
    all_images = []
    while len(all_images) * args.batch_size < args.num_samples:
        one = draw()
        gathered = [one.clone() for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, one)
        for image in gathered:
            all_images.append(image.numpy())

# the_first_rank_asks_again: legal
import torch.distributed as dist
def talk(generate):
    said = [None]
    while True:
        if dist.get_rank() == 0:
            said = [input("> ").strip()]
            if not said[0]:
                continue
        dist.broadcast_object_list(said, src=0)
        generate(said[0])

# the_first_rank_tries_again: legal
import torch.distributed as dist
def talk(generate):
    said = [None]
    while True:
        try:
            said = ask()
        except ValueError:
            continue
        dist.broadcast_object_list(said, src=0)
        generate(said[0])

# a_rank_that_skips_an_item: early-exit
import torch.distributed as dist
def talk(items):
    for item in items:
        if dist.get_rank() == 0:
            if not item:
                continue
        dist.broadcast_object_list([item], src=0)

# a_rank_that_begins_again_behind_a_collective: early-exit
import torch.distributed as dist
def talk(said):
    while True:
        dist.barrier()
        if dist.get_rank() == 0:
            if not said():
                continue
        dist.broadcast_object_list([None], src=0)

# the_others_serve_for_ever: legal
import torch.distributed as dist
def serve(model):
    while True:
        dist.barrier()
        asked = [None]
        dist.broadcast_object_list(asked)
        model(asked[0])
def main(model, page):
    if dist.get_rank() == 0:
        page.launch()
    else:
        serve(model)

# suppressed: legal
import torch.distributed as dist
def save(rank):
    if rank == 0:
        dist.barrier()  # ddpstats: ignore[rank-branch]

# suppressed_above: legal
import torch.distributed as dist
def save(rank):
    if rank == 0:
        # the others wait in serve()   ddpstats: this is prose
        # ddpstats: ignore[rank-branch]
        dist.barrier()

# equal_parts_by_the_sampler: legal
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
def validate(model, dataset):
    batches = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
    total_loss, num_samples = 0.0, 0
    for x in batches:
        total_loss += model(x).item()
        num_samples += len(x)
    loss = torch.tensor(total_loss / num_samples)
    dist.all_reduce(loss)
    loss /= dist.get_world_size()

# parts_that_accelerate_prepared: legal
import torch
import torch.distributed as dist
def validate(accelerator, model, batches):
    batches = accelerator.prepare(batches)
    losses = [model(x).item() for x in batches]
    loss = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)

# mean_over_a_fixed_number_of_steps: legal
import numpy as np
import torch, torch.distributed as dist
def train(step, steps, epochs):
    for epoch in range(epochs):
        losses = []
        for _ in range(steps):
            losses.append(step())
        mean = torch.tensor(np.mean(losses))
        dist.all_reduce(mean)
        mean /= dist.get_world_size()

# mean_by_a_loader_in_a_loop_of_epochs: mean-of-means
import numpy as np
import torch, torch.distributed as dist
def train(step, loader, epochs):
    for epoch in range(epochs):
        losses = [step(x) for x in loader]
        mean = torch.tensor(np.mean(losses))
        dist.all_reduce(mean)
        mean /= dist.get_world_size()

# count_that_was_reduced: legal
import torch.distributed as dist
def loss_of(loss_sum, num_tokens):
    dist.all_reduce(num_tokens, op=dist.ReduceOp.AVG)
    loss = loss_sum / num_tokens
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss

# shape_of_the_second_name: legal
import torch.distributed as dist
def f(preds):
    t = preds
    dist.all_reduce(t)
    assert t is preds and len(preds) and preds.size(0)
    return t.view(preds.shape)

# reduced_for_its_second_name: legal
import torch.distributed as dist
def f(loss):
    buffer = loss
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    print("mean of all ranks", loss.item())

# made_elsewhere: legal
import torch.distributed as dist
from .utils import ddp_mean
def fit(model, loader, trainer):
    for epoch in range(9):
        loss = ddp_mean(run(model, loader))
        if loss > 10 or loss.item() > 9:
            return
        loss = trainer.train_step(loader)
        if loss < 0.01:
            break
        dist.barrier()

# losses_of_the_configuration: legal
import torch, torch.distributed as dist
class Criterion(torch.nn.Module):
    def __init__(self, losses, metrics, w_kl_loss=0.0):
        self.losses = losses
        self.metrics = [one for one in metrics]
        self.outputs = torch.nn.ModuleList([torch.nn.L1Loss()])
        self.w_kl_loss = w_kl_loss
    def forward(self, n):
        if len(self.losses) > 0 or self.w_kl_loss > 0 or len(self.outputs) > 0:
            dist.all_reduce(n)
        if len(self.metrics) == 0:
            return n
        dist.all_reduce(n)

# own_list_of_the_class: early-exit
import torch.distributed as dist
class Loop:
    def __init__(self):
        self.outputs = []
    def step(self, batch):
        self.outputs.append(batch)
    def end(self, x):
        if len(self.outputs) == 0:
            return
        dist.all_reduce(x)

# names_of_metrics: legal
import torch.distributed as dist
def evaluate(model, loader, metrics, losses=("loss", "acc")):
    feats = run(model, loader)
    if "fid" in metrics or "acc" in losses or len(losses) == 0:
        dist.all_reduce(feats)

# keys_of_the_text: legal
import lightning as L
class Model(L.LightningModule):
    def training_step(self, batch, i):
        metrics = {"loss": self.net(batch)}
        if self.hparams.acc:
            metrics["acc"] = acc(batch)
        if "acc" in metrics:
            self.log("acc", metrics["acc"], sync_dist=True)

# rank_of_a_decomposition: legal
import torch.distributed as dist
class State:
    def __init__(self, rank: int = 4):
        self.rank = rank
def hook(state, bucket):
    if state.rank > 0:
        dist.all_reduce(bucket)

# rank_as_a_size: legal
import torch, torch.distributed as dist
def factors(n, rank):
    left = torch.randn(n, rank)
    if rank > 8:
        dist.all_reduce(left)

# result_taken_apart: legal
import torch, torch.distributed as dist
def f(loss, acc):
    packed = torch.stack([loss, acc])
    dist.all_reduce(packed)
    acc, loss = packed.unbind()
    if loss.item() > 10:
        return
    (part,) = torch.split(packed, 2)
    if torch.isnan(torch.nan_to_num(torch.cat([part, packed])).sum()):
        return
    loss = torch.stack([packed, packed]).mean()
    if torch.isnan(loss.reshape(-1)) or loss > 3:
        return
    dist.barrier()

# tensor_filled_by_the_batch: early-exit
import torch, torch.distributed as dist
def f(model, batch):
    losses = torch.zeros(3)
    losses[0] = model(batch)
    if torch.isnan(losses.sum()):
        return
    dist.barrier()

# groups_by_other_names: legal
import torch.distributed as dist, torch.distributed.nn
import horovod.torch as hvd
import torch_xla.core.xla_model as xm
import lightning as L
def f(x, rank, few, everybody):
    if rank < 4:
        torch.distributed.nn.all_gather(x, few)
        hvd.allreduce(x, process_set=everybody)
        xm.all_reduce("sum", [x], groups=[[0, 1, 2, 3]])
class Model(L.LightningModule):
    def training_step(self, batch, i):
        if self.global_rank < 2:
            self.log("x", 1.0, sync_dist=True, sync_dist_group=self.first)

# functional_of_all_ranks: rank-branch
import torch.distributed as dist, torch.distributed.nn
def f(x, rank):
    if rank < 4:
        torch.distributed.nn.all_reduce(x, dist.ReduceOp.SUM)

# metrics_that_sync_otherwise: legal
from torchmetrics import Accuracy, MetricCollection
import torch.distributed as dist
def f(rank, x, g):
    if rank == 0:
        alone = MetricCollection([Accuracy(task="binary", sync_on_compute=False)])
        gathered = Accuracy(task="binary", distributed_available_fn=lambda: False)
        grouped = Accuracy(task="binary", process_group=g)
        print(alone.compute(), gathered.compute(), grouped.compute())

# strategy_of_no_trainer: legal
import lightning
def choose(strategy, rank):
    if rank == 0:
        strategy.reduce("x")

# backward_of_other_models: legal
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def head_alone(head, loader):
    if dist.get_rank() == 0:
        for x, y in loader:
            loss = head(x, y)
            loss.backward()
    dist.barrier()
def train(model, probe, batch):
    model = DDP(model)
    loss = model(batch)
    loss.backward()
    probe_loss = probe(batch)
    if probe_loss > 1:
        probe_loss.backward()

# backward_without_sync: legal
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def train(model, batches):
    model = DDP(model)
    with model.no_sync():
        for batch in batches:
            loss = model(batch)
            if torch.isnan(loss):
                continue
            loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)

# own_object_that_is_called: rank-branch
import ddpstats
reducer = ddpstats.StatsReducer()
def f(rank, stats):
    if rank == 0:
        reducer(stats)

# status_of_main: legal
import sys, logging
import torch.distributed as dist
def main():
    try:
        train()
        dist.barrier()
    except Exception:
        logging.exception("failed")
        return 1
    return 0
if __name__ == "__main__":
    sys.exit(main())

# status_set_first: legal
import sys
import torch.distributed as dist
def run():
    code = 0
    try:
        train()
        dist.barrier()
    except Exception:
        code = 1
    raise SystemExit(code)

# skipped_as_out_of_memory: swallowed-error
from torch.nn.parallel import DistributedDataParallel as DDP
def train(model, loader):
    model = DDP(model)
    for batch in loader:
        try:
            loss = model(batch)
            loss.backward()
        except RuntimeError as error:
            if "out of memory" in str(error):
                continue
            raise

# left_as_out_of_memory: early-exit
import torch.distributed as dist
def train(model, loader):
    for batch in loader:
        try:
            loss = model(batch)
        except RuntimeError as error:
            if "out of memory" in str(error):
                print("skip")
                continue
            else:
                raise error
        dist.all_reduce(loss)

# skipped_where_alone: legal
import torch.distributed as dist
def train(model, loader, world_size):
    for batch in loader:
        try:
            loss = model(batch)
        except RuntimeError as error:
            if world_size == 1 and "out of memory" in str(error):
                continue
            raise
        dist.all_reduce(loss)

# agreed_out_of_memory: legal
import torch, torch.distributed as dist
def train(model, loader):
    for batch in loader:
        bad = torch.zeros(1)
        try:
            loss = model(batch)
        except RuntimeError as error:
            if "out of memory" in str(error):
                bad.fill_(1)
            else:
                raise
        dist.all_reduce(bad)

# keys_compared_before: legal
import torch.distributed as dist
def reduce_losses(losses):
    all_keys = [None] * dist.get_world_size()
    dist.all_gather_object(all_keys, list(losses))
    if any(keys != all_keys[0] for keys in all_keys):
        raise ValueError("ranks have other keys")
    for name, value in losses.items():
        dist.all_reduce(value)

# dict_by_its_keyword: legal
import torch.distributed as dist
def reduce_dict(losses):
    for value in losses.values():
        dist.all_reduce(value)
class Reducer:
    def reduce(self, losses):
        for value in losses.values():
            dist.all_reduce(value)
reducer = Reducer()
def train(model, batch):
    out = model(batch)
    reduce_dict(losses={"ce": out.ce, "kl": out.kl})
    reducer.reduce({"ce": out.ce, "kl": out.kl})

# sorted_before: legal
import torch.distributed as dist
def reduce_dict(losses):
    losses = dict(sorted(losses.items()))
    for value in losses.values():
        dist.all_reduce(value)

# set_of_numbers: legal
import torch.distributed as dist
def f(t, ranks):
    for i in set(range(4)):
        dist.all_reduce(t[i])
    for i in {2, 4}:
        dist.all_reduce(t[i])
    for i in set(ranks):
        dist.broadcast(t, src=i)

# set_of_strings: dict-order
import torch.distributed as dist
def f(table):
    for key in {"loss", "acc"}:
        dist.all_reduce(table[key])

# answered_in_another_file: legal
import torch.distributed as dist
from . import follow
from .worker import receive_from_master
def share(x, rank):
    if rank == 0:
        dist.broadcast(x, 0)
    else:
        x = receive_from_master()
    return x
def main(rank, prompts, model):
    if rank != 0:
        follow.worker_loop(model)
        return
    for prompt in prompts:
        dist.broadcast_object_list([prompt], 0)

# leader_that_may_fail: legal
import pickle
import torch.distributed as dist
def predict(model, shards, out):
    try:
        pickle.dumps(shards)
    except Exception:
        return model(shards)
    dist.scatter_object_list(out, shards)
    return out

# tried_again: legal
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def train(model, loader):
    model = DDP(model)
    for batch in loader:
        while True:
            try:
                loss = model(batch)
                loss.backward()
                done()
            except RuntimeError as error:
                if "out of memory" in str(error):
                    continue
                raise
            break
def share(path):
    for attempt in range(3):
        try:
            x = read(path)
            dist.broadcast(x, src=0)
            break
        except OSError:
            print("again")

# set_of_one: legal
import torch.distributed as dist
def f(table):
    for key in {"loss"}:
        dist.all_reduce(table[key])

# padded_files: legal
import torch.distributed as dist
def f(files, rank, world):
    files = pad_to_multiple(files, world)
    for i in range(rank, len(files), world):
        dist.barrier()

# folder_of_a_file_is_made: legal
import os
import torch.distributed as dist
def cached(path, rank):
    if os.path.exists(path):
        return load(path)
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    dist.barrier()
    return compute(path)

# folder_of_a_path_is_made: legal
import torch.distributed as dist
def cached(path, rank):
    if path.exists():
        return load(path)
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".write_test_{path.stem}"
        probe.touch()
    dist.barrier()
    return compute(path)

# any_of_a_mask: data-branch
import lightning
class Module(lightning.LightningModule):
    def training_step(self, batch, index):
        loss = self.net(batch["x"])
        if batch["mask"].any():
            self.log("masked", loss[batch["mask"]].mean(), sync_dist=True)
        return loss.mean()

# sum_of_a_mask: data-branch
import torch.distributed as dist
def masked(pred, target, mask):
    count = mask.sum()
    if count > 0:
        dist.all_reduce(count)
        return ((pred - target) * mask).sum() / count
    return pred.sum() * 0

# sum_of_a_mask_that_is_reduced: legal
import torch.distributed as dist
def masked(pred, mask):
    count = mask.sum()
    dist.all_reduce(count)
    if count > 0:
        dist.all_reduce(pred)

# entry_of_metrics_that_a_trainer_has_reduced: legal
import torch.distributed as dist
def on_validation_end(trainer, best):
    metrics = trainer.callback_metrics
    if metrics["val_loss"].item() < best:
        dist.barrier()

# engine_saves_on_rank_0: rank-branch
import deepspeed
import torch.distributed as dist
def train(args, model, batches):
    engine, _, _, _ = deepspeed.initialize(args=args, model=model)
    for batch in batches:
        engine.backward(engine(batch))
        engine.step()
    if dist.get_rank() == 0:
        engine.save_checkpoint(args.out)

# engine_skips_a_batch: early-exit
import deepspeed
import torch
def train(args, model, batches):
    engine, *_ = deepspeed.initialize(args=args, model=model)
    for batch in batches:
        loss = engine(batch)
        if torch.isnan(loss):
            continue
        engine.backward(loss)
        engine.step()

# engine_saves_on_all_ranks: legal
import deepspeed
import torch.distributed as dist
def save(args, model):
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
    engine.save_checkpoint(args.out)
    if dist.get_rank() == 0:
        optimizer.step()
        print("saved")

# wrapped_model_saves_on_rank_0: missed rank-branch
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def save(net, rank):
    model = FSDP(net)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")

# main_only: rank-branch
import torch.distributed as dist
from train.ranks import main_only
@main_only
def log(loss):
    dist.all_reduce(loss)

# set_in_a_variable: dict-order
import torch.distributed as dist
def mean(here, there):
    names = set(here) | set(there)
    for name in names:
        dist.all_reduce(here[name])

# set_that_is_sorted_later: legal
import torch.distributed as dist
def mean(stats):
    names = set(stats)
    names = sorted(names)
    for name in names:
        dist.all_reduce(stats[name])

# error_is_raised_later: legal
import torch.distributed as dist
def step(model, batch, timer):
    failed = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except RuntimeError as error:
        failed = error
    timer.stop()
    if failed is not None:
        raise failed
    return loss

# helper_that_may_return_first: legal
import torch.distributed as dist
def mean(x, enabled):
    if not enabled:
        return
    dist.all_reduce(x)
def log(x, rank):
    if rank == 0:
        mean(x, False)

# helper_with_the_same_in_both_branches: rank-branch
import torch.distributed as dist
def total(x, twice):
    if twice:
        dist.all_reduce(x * 2)
    else:
        dist.all_reduce(x)
def log(x, rank):
    if rank == 0:
        total(x, True)

# branch_inside_of_try: rank-branch
import torch.distributed as dist
def save(x, rank):
    try:
        if rank == 0:
            dist.barrier()
    finally:
        print(x)

# branch_in_finally: rank-branch
import torch.distributed as dist
def save(x, rank):
    try:
        print(x)
    finally:
        if rank == 0:
            dist.barrier()

# branch_in_a_context: rank-branch
import torch, torch.distributed as dist
def save(x, rank):
    with torch.no_grad():
        if rank == 0:
            dist.barrier()

# return_out_of_a_loop: early-exit
import torch.distributed as dist
def find(items, rank):
    for item in items:
        if rank == 0 and item:
            return item
    dist.barrier()

# branch_behind_a_loop_that_was_not_left: rank-branch
import torch.distributed as dist
def find(items, rank):
    for item in items:
        if item:
            break
    else:
        if rank == 0:
            dist.barrier()

# unused_comment: unused-ignore
import torch.distributed as dist
def save(rank):
    dist.barrier()  # ddpstats: ignore[rank-branch]

# unknown_rule: unused-ignore
import torch.distributed as dist
def save(rank):
    dist.barrier()  # ddpstats: ignore[rank-brunch]

# rank_0_probes_another_model: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, teacher, loader, rank):
    model = DDP(net)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
    if rank == 0:
        head = torch.nn.Linear(4, 2)
        loss = head(teacher(x)).sum()
        loss.backward()

# saliency_of_the_inner_model: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, y, rank):
    model = DDP(net)
    loss = (model(x) - y).abs().sum()
    loss.backward()
    if rank == 0:
        x.requires_grad_()
        score = model.module(x).max()
        score.backward()

# probe_of_detached_features: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, probe, x, rank):
    model = DDP(net)
    feats = model(x).detach()
    if rank == 0:
        loss = probe(feats).sum()
        loss.backward()

# probe_of_features_without_gradient: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, probe, x, rank):
    model = DDP(net)
    with torch.no_grad():
        feats = model(x)
    if rank == 0:
        probe(feats).sum().backward()

# inner_model_in_a_variable: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, rank):
    model = DDP(net)
    inner = model.module
    if rank == 0:
        loss = inner(x).sum()
        loss.backward()

# inner_model_takes_the_name: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(model, x, rank):
    model = DDP(model)
    model(x).sum().backward()
    model = model.module
    if rank == 0:
        loss = model(x).sum()
        loss.backward()

# copy_of_the_model: legal
import copy
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, rank):
    local = copy.deepcopy(net)
    model = DDP(net)
    loss = model(x).sum()
    loss.backward()
    if rank == 0:
        loss = local(x).sum()
        loss.backward()

# model_that_is_wrapped_besides: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, rank):
    model = DDP(net)
    if rank == 0:
        out = net(x)
        loss = out.sum() + out.mean()
        loss.backward()
    loss = model(x).sum()
    loss.backward()

# model_before_it_is_wrapped: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(model, x, rank):
    if rank == 0:
        model(x).sum().backward()
    model = DDP(model)
    model(x).sum().backward()

# loss_made_anew_by_the_wrapped_model: rank-branch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, head, x, rank):
    model = DDP(net)
    loss = head(x).sum()
    loss.backward()
    loss = model(x).sum()
    if rank == 0:
        loss.backward()

# wrapped_model_in_two_precisions: early-exit
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Trainer:
    def __init__(self, net):
        self.model = DDP(net)
    def fit(self, batches, scaler, is_half):
        model = self.model
        for batch in batches:
            losses = {}
            if is_half:
                with torch.autocast("cuda"):
                    losses["ce"] = model(batch)
            else:
                losses["ce"] = model(batch)
            loss = sum(losses.values())
            loss /= 2
            if torch.isnan(loss):
                continue
            scaler.scale(loss).backward()

# exit_by_a_flag: legal
import sys
import torch.distributed as dist
def run(model, x):
    ok = True
    try:
        loss = model(x)
        dist.all_reduce(loss)
    except Exception as e:
        print(e)
        ok = False
    if not ok:
        sys.exit(1)
    print("done")

# raised_by_a_flag: legal
import torch.distributed as dist
class Step:
    def run(self, model, x):
        try:
            loss = model(x)
            dist.all_reduce(loss)
        except Exception:
            self.failed += 1
    def end(self):
        if self.failed > 0:
            print("failed")
            raise RuntimeError("a step has failed")

# asserted_in_the_end: legal
import torch.distributed as dist
def run(model, batches):
    problems = []
    for x in batches:
        try:
            loss = model(x)
            dist.all_reduce(loss)
        except Exception as e:
            problems.append(str(e))
    assert not problems, problems

# error_among_the_results: legal
import torch.distributed as dist
def run(model, x):
    results = {}
    def worker(i):
        try:
            loss = model(x[i])
            dist.all_reduce(loss)
            results[i] = (loss, None)
        except Exception as e:
            results[i] = (ValueError(f"shard {i}: {e}"), e)
    worker(0)
    last = results[0]
    if isinstance(last[0], ValueError):
        raise last[0] from last[1]
    return results

# error_for_another_thread: legal
import torch.distributed as dist
def work(model, x, done):
    try:
        loss = model(x)
        dist.all_reduce(loss)
        done.put(loss)
    except Exception as e:
        done.put(e)

# error_that_a_test_expects: legal
from torch.nn.parallel import DistributedDataParallel as DDP
class Tests:
    def test_unused_parameters(self, net, x):
        model = DDP(net)
        try:
            model(x).sum().backward()
        except RuntimeError as e:
            self.assertIn("unused", str(e))

# no_rank_is_below_zero: legal
import torch.distributed as dist
class Base:
    MAIN = -1
    def tear_down(self):
        if self.rank != self.MAIN:
            dist.barrier()

# flag_that_ends_nothing: swallowed-error
import torch.distributed as dist
def run(model, x):
    ok = True
    try:
        loss = model(x)
        dist.all_reduce(loss)
    except Exception as e:
        error = str(e)
        ok = False
    if not ok:
        print("failed", error)

# default_that_is_no_rank: rank-branch
import torch.distributed as dist
rank = -1
def save(x):
    rank = dist.get_rank()
    if rank == 0:
        dist.barrier()

# set_of_a_dict: dict-order
import torch.distributed as dist
def reduce(losses):
    for name in set(losses):
        dist.all_reduce(losses[name])

# set_of_ranks: legal
import torch.distributed as dist
def share(tensors, ranks):
    for rank in set(ranks):
        dist.broadcast(tensors[rank], rank)

# alias_in_one_line: aliased-reduce
import torch.distributed as dist
def step(loss):
    total = loss; dist.all_reduce(total); print(loss, total)

# set_anew_in_one_line: legal
import torch.distributed as dist
def step(loss):
    total = loss; dist.all_reduce(total); loss = total / 2; print(loss, total)

# either_of_two_in_one_line: legal
import torch.distributed as dist
def step(loss):
    total = loss
    dist.all_reduce(total) if dist.is_initialized() else print(loss)
    return total + 1

# mean_in_one_line: mean-of-means
import torch.distributed as dist
def accuracy(correct, total):
    accuracy = correct / total; dist.all_reduce(accuracy, op=dist.ReduceOp.AVG); return accuracy

# constant_of_a_base_elsewhere: legal
import torch.distributed as dist
from common import Base
class Tests(Base):
    def tear_down(self):
        if self.rank != self.MAIN:
            dist.barrier()

# constant_of_the_file: rank-branch
import os
import torch.distributed as dist
MAIN = 0
RANK = int(os.environ["RANK"])
def save(x):
    if RANK == MAIN:
        dist.barrier()

# unwrapped_where_it_is_wrapped: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(model, x, rank):
    model = DDP(model)
    model(x).sum().backward()
    model = model.module if isinstance(model, DDP) else model
    if rank == 0:
        model(x).sum().backward()

# unwrapped_by_accelerate: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(model, x, accelerator, rank):
    model = DDP(model)
    model(x).sum().backward()
    model = accelerator.unwrap_model(model)
    if rank == 0:
        model(x).sum().backward()

# results_that_another_function_checks: swallowed-error
import torch.distributed as dist
def mean_of(results, count):
    if len(results) != count:
        raise ValueError("not all results are there")
    return sum(results) / count
def evaluate(model, loader):
    results = []
    for batch in loader:
        try:
            score = model(batch)
            dist.all_reduce(score)
            results.append(score)
        except Exception:
            results = None
            break
    return results

# assertion_about_something_else: swallowed-error
import logging
import torch.distributed as dist
def train_step(net, batch, step):
    try:
        loss = net(batch)
        dist.all_reduce(loss)
    except Exception as error:
        assert step >= 0, "steps are counted from 0"
        logging.warning("step %d: %s", step, error)

# assertion_where_all_went_well: swallowed-error
import torch.distributed as dist
def forward(model, batch):
    loss = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except RuntimeError as error:
        loss = None
        print("left out:", error)
    else:
        assert loss is not None
    return loss

# assertion_that_is_caught_itself: swallowed-error
import torch, torch.distributed as dist
def forward(model, batch):
    try:
        out = model(batch)
        assert torch.isfinite(out).all()
        dist.all_reduce(out)
    except Exception:
        out = None
    return out

# errors_are_only_counted: swallowed-error
import torch.distributed as dist
def run(model, batches):
    errors = []
    for batch in batches:
        try:
            loss = model(batch)
            dist.all_reduce(loss)
        except Exception as e:
            errors.append(e)
    return len(errors)

# last_error_is_only_printed: swallowed-error
import torch.distributed as dist
class Runner:
    def run(self, batches):
        last = None
        for batch in batches:
            try:
                self.window = self.net(batch)
                dist.all_reduce(self.window)
            except Exception as err:
                last = err
        print("the last error was", last)

# counter_of_what_fails: swallowed-error
import torch.distributed as dist
def step(model, x, counters):
    try:
        y = model(x)
        dist.all_reduce(y)
    except Exception:
        counters.fail()

# variable_that_another_function_asserts: swallowed-error
import torch.distributed as dist
def step(model, batch):
    try:
        x = model(batch)
        dist.all_reduce(x)
    except Exception:
        x = 0
    return x
def logarithm(x):
    assert x > 0
    return x.log()

# first_of_the_errors_is_raised: legal
import torch.distributed as dist
def run(model, batches):
    errors = []
    for batch in batches:
        try:
            loss = model(batch)
            dist.all_reduce(loss)
        except Exception as e:
            errors.append(e)
    for error in errors:
        raise error

# error_is_returned_with_the_loss: legal
import torch.distributed as dist
def attempt(model, batch):
    loss = failure = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except Exception as e:
        failure = e
    return loss, failure

# errors_of_the_caller: legal
import torch.distributed as dist
def attempt(model, batch, errors):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except Exception as e:
        errors.append({"error": e})

# flag_of_the_module: legal
import torch.distributed as dist
all_well = True
def attempt(model, batch):
    global all_well
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except Exception as e:
        print(e)
        all_well = False
attempt(make(), [1])
assert all_well

# false_is_asserted_by_the_caller: legal
import torch.distributed as dist
def attempt(model, batch):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except Exception as e:
        print(e)
        return False
    return True
def main(model, batches):
    assert all(attempt(model, one) for one in batches), "a batch has failed"

# assertion_about_the_text_of_the_error: legal
import torch.distributed as dist
def check_shapes(model, odd):
    try:
        out = model(odd)
        dist.all_reduce(out)
    except RuntimeError as e:
        message = str(e)
        assert "shape" in message

# test_that_ends_in_its_assertion: legal
import torch.distributed as dist
def test_no_odd_sizes(model, odd, calls):
    try:
        out = model(odd)
        dist.all_reduce(out)
    except RuntimeError:
        assert calls == ["forward"]
    else:
        assert False

# error_in_an_answer: legal
import torch.distributed as dist
def attempt(model, batch, answers):
    failure = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except Exception as e:
        failure = e
    answers.reply(Answer(batch, error=failure))

# error_in_a_tuple_for_a_queue: legal
import torch.distributed as dist
def work(number, model, batch, queue):
    try:
        loss = model(batch)
        dist.all_reduce(loss)
        output = (number, loss)
    except Exception as e:
        output = (number, e)
    queue.put(output)

# test_that_is_to_fail: legal
import torch.distributed as dist
def to_fail(case, model, odd):
    try:
        out = model(odd)
        dist.all_reduce(out)
    except Exception:
        return
    else:
        case.fail("odd sizes went through")

# problems_for_a_function_that_ends_the_run: legal
import sys
import torch.distributed as dist
def finish(found):
    if found:
        sys.exit(f"{len(found)} batches have failed")
def run(model, batches):
    bad = []
    for number, batch in enumerate(batches):
        try:
            loss = model(batch)
            dist.all_reduce(loss)
        except RuntimeError:
            bad.append(number)
    finish(bad)

# error_for_a_function_that_shows_it: swallowed-error
import torch.distributed as dist
def show(error):
    print("skipped:", error)
def run(model, batch):
    error = None
    try:
        loss = model(batch)
        dist.all_reduce(loss)
    except RuntimeError as e:
        error = e
    show(error)

# attribute_of_an_asserted_name: swallowed-error
import torch.distributed as dist
class Meter:
    def update(self, net, batch):
        try:
            self.value = net(batch)
            dist.all_reduce(self.value)
        except RuntimeError:
            self.value = None
def show(value):
    assert value is not None
    print(value)

# constant_with_its_type: rank-branch
import torch.distributed as dist
MAIN: int = 0
def save(rank):
    if rank == MAIN:
        dist.barrier()

# last_of_the_ranks: rank-branch
import os
import torch.distributed as dist
LAST = int(os.environ["WORLD_SIZE"]) - 1
class Writer:
    def close(self):
        if self.rank != LAST:
            dist.barrier()

# two_constants_in_a_line: rank-branch
import torch.distributed as dist
READER, WRITER = 0, 1
def hand_over(x):
    if dist.get_rank() == WRITER:
        dist.broadcast(x, WRITER)

# constant_of_a_class_of_the_file: rank-branch
import enum
import torch.distributed as dist
class Role(enum.IntEnum):
    LEAD = 0
    HELP = 1
def start(rank):
    if Role.LEAD == rank:
        dist.barrier()

# parameter_in_capitals: rank-branch
import torch.distributed as dist
def gather_some(x, rank, N):
    if rank < N:
        dist.all_reduce(x)

# rank_of_the_arguments: rank-branch
import torch.distributed as dist
def main(args):
    rank = dist.get_rank()
    if rank == args.MAIN_RANK:
        dist.barrier()

# constant_with_its_type_below_zero: legal
import torch.distributed as dist
NOT_DISTRIBUTED: int = -1
def save(local_rank):
    if local_rank != NOT_DISTRIBUTED:
        dist.barrier()

# two_constants_one_below_zero: legal
import torch.distributed as dist
NOBODY, FIRST = -1, 0
def save(rank):
    if rank != NOBODY:
        dist.barrier()

# constant_of_a_class_elsewhere: legal
import torch.distributed as dist
import roles
def save(rank):
    if rank != roles.Role.ALONE:
        dist.barrier()

# gradient_is_switched_off: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, probe, x, rank):
    wrapped = DDP(net)
    with torch.set_grad_enabled(False):
        features = wrapped(x)
    if rank == 0:
        probe(features).sum().backward()

# gradient_is_switched_on: rank-branch
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, probe, x, rank):
    wrapped = DDP(net)
    with torch.set_grad_enabled(True):
        features = wrapped(x)
    if rank == 0:
        probe(features).sum().backward()

# classes_are_no_gradient: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, head, x, y, rank):
    model = DDP(net)
    out = model(x)
    classes, hits = torch.argmax(out, 1), (out.argmax(1) == y).float()
    if rank == 0:
        (head(classes).sum() * hits.mean()).backward()

# number_of_the_old_loss: legal
from torch.nn.parallel import DistributedDataParallel
class Trainer:
    def __init__(self, net, teacher):
        self.net = DistributedDataParallel(net)
        self.teacher = teacher
    def step(self, x, rank):
        loss = self.net(x).mean()
        loss.backward()
        if not rank:
            distilled = self.teacher(x.to(loss.device)).mean() * float(loss)
            distilled.backward()

# loop_over_other_models: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, teachers, x, rank):
    model = DDP(net)
    model(x).sum().backward()
    if rank == 0:
        for model in teachers:
            model(x).sum().backward()

# other_models_in_a_comprehension: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, teachers, x, rank):
    model = DDP(net)
    model(x).sum().backward()
    if rank == 0:
        sum(model(x).sum() for model in teachers).backward()

# other_model_in_a_context: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, on_loan, x, rank):
    model = DDP(net)
    model(x).sum().backward()
    if rank == 0:
        with on_loan() as model:
            loss = model(x).sum()
            loss.backward()

# other_model_takes_the_name: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, rank):
    model = DDP(net)
    model(x).sum().backward()
    if rank == 0:
        model = make_probe()
        model(x).sum().backward()

# loss_made_anew_without_gradient: legal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, rank):
    model = DDP(net)
    loss = model(x).sum()
    loss.backward()
    with torch.no_grad():
        loss = loss * 2
    if rank == 0:
        weight = torch.ones(1, requires_grad=True)
        (weight * loss).backward()

# wrapped_model_is_frozen: legal
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, probe, x, rank):
    model = DDP(net)
    model(x).sum().backward()
    model.requires_grad_(False)
    features = model(x)
    if rank == 0:
        probe(features).sum().backward()

# wrapped_where_there_are_others: rank-branch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def fit(net, x, rank):
    if dist.is_initialized():
        model = DDP(net)
    else:
        model = net
    loss = model(x).sum()
    if rank == 0:
        loss.backward()

# set_anew_in_the_block_of_its_hook: legal
import torch.distributed as dist
def step(loss, hooks):
    total = loss
    with hooks(dist.all_reduce(total)):
        loss = total.clone()
    print(loss)
    return total

# read_in_the_block_of_its_hook: aliased-reduce
import torch.distributed as dist
def step(loss, hooks):
    total = loss
    with hooks(dist.all_reduce(total)):
        if loss > 3:
            loss = total.clone()
    return total
"""


@dataclass(frozen=True)
class Case:
    """``rule`` is None for a legal program."""

    name: str
    rule: str | None
    missed: bool
    text: str


def cases() -> list[Case]:
    parts = re.split(r"^# (\w+): (missed )?([a-z-]+)\n", PROGRAMS, flags=re.MULTILINE)[1:]
    fields = zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True)
    return [Case(name, None if rule == "legal" else rule, bool(missed), text) for name, missed, rule, text in fields]
