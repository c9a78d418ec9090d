"""The training loop of `Finetuner`, `train`, `snl` and `autorep`.

    loss = CE(s, labels) + distill · T² · KL(softmax(t/T) ‖ softmax(s/T)) + β/2 · mismatch + penalty

s are the net's logits and t the teacher's; CE, or a loss of the user's, and KL are means over the
batch. Where the outputs are maps, they are means over the positions too. β is `Finetune.mismatch`,
and the mismatch that of training/mismatch.py.
"""

from __future__ import annotations

import math
import operator
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from fastbcd.data.arrays import are_indices
from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.graph.fuse import fused
from fastbcd.masking.activations import MaskedLine, MaskedPoly
from fastbcd.masking.masks import masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runtime import ranks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.module_mode import train_mode
from fastbcd.runtime.tf32 import fast_convolutions, repeatable_convolutions
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.scoring.accuracy import check_classes, first_outputs
from fastbcd.scoring.metric import Criterion, Loss, are_logits, at_least_float32, describe
from fastbcd.training.mismatch import mismatch, site_outputs
from fastbcd.training.muon import Muon
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import TeacherLogits, distillation, with_sites

CHECK_EVERY = 32  # batches between two checks that losses and gradients are finite
# SGD's learning rate of the coefficients of lines and quadratics, a share of the weights', and that
# of c2, a share of it. The gradient of c2 is a sum of x² over all positions, and a deep net squares
# a growing x again and again: with a share of 1 ResNet-20 diverges in its second step from dense,
# with 0.003 after 26 epochs of 5,000 images, at |c2| = 0.05. So |c2| has a bound: it does not grow
# beyond it, and where it is larger, as after `to_poly`, it can only fall. From c2 = 0, 8,000 ReLUs,
# 15 epochs of 2,000 images: 75.1 % with 0.03 and the bound, which nearly all sites reach, 73.5 with
# 0.003 and none. With a bound of 0.02 it is 76.4 %, and 30 epochs of 5,000 images diverge after 17.
COEFFICIENTS, SQUARES, SQUARES_MOST = 0.1, 0.03, 0.01
QUADRATICS_MOST = 1e-4  # Adam's learning rate of quadratics beside Muon's, at most
VECTORS = 0.1  # Adam's learning rate of biases and batch norms beside Muon's, a share of it
NET, OPTIMIZER = "net.", "optimizer."  # prefixes of tensor names in `Trainer.state`


class Trainer:
    """Trains a network in place, one epoch per call; what `Finetuner` promises holds here.

    `step` selects the random crops and flips. With several ranks each batch is split among them.
    A net in float16 or bfloat16 is trained in float32 and rounded at the end of the session; one
    in float64 is trained in float64. With a batch norm in train mode a last batch of a single
    sample per rank joins the batch before it.
    """

    def __init__(
        self, net: nn.Module, data: Any, settings: Finetune,
        teacher: nn.Module | TeacherLogits | None = None, *, seed: int = 0,
        loss: Loss | None = None, fused_optimizer: bool = True,
    ) -> None:  # fmt: skip
        self.net, self.settings, self.seed, self.loss = net, settings, seed, loss
        self.data = data_for(net, data)
        if not isinstance(teacher, TeacherLogits):
            check_trainable(net, self.data, settings, teacher, loss)
            given, teacher = teacher, None
            if given is not None and (settings.distill or settings.mismatch):
                teacher = TeacherLogits(given, self.data, settings)
            if settings.mismatch:
                if given is None:
                    raise ValueError(f"mismatch={settings.mismatch} needs a teacher: give one")
                check_same_sites(net, self.data, given)
        if settings.batch_size < ranks.world():
            raise ValueError(f"batch_size={settings.batch_size}; there are {ranks.world()} ranks")
        self.teacher, self.fused_optimizer = teacher, fused_optimizer
        self.dtype = training_dtype(net)
        self.trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.model, self.memory_format = fused(net)
        cannot = self.data.device.type == "cpu" or self.model is self.net
        if settings.sync_batch_norm and ranks.world() > 1 and cannot:
            raise ValueError(
                "sync_batch_norm=True; torch has it for GPUs only, and fastbcd for nets that it "
                "can trace: pass a net with nn.SyncBatchNorm, or sync_batch_norm=False"
            )
        if settings.compile:
            self.model.compile()

    @contextmanager
    def session(self) -> Iterator[None]:
        """A new optimizer; on exit modes, dtypes and memory formats are as they were."""
        tensors = (*self.net.parameters(), *self.net.buffers())
        narrow = [(t, t.dtype) for t in tensors if t.dtype in (torch.float16, torch.bfloat16)]
        turned = [p for p in self.net.parameters() if p.ndim == 4 and p.is_contiguous()]
        own_precision = torch.autocast(self.data.device.type, enabled=False)
        with kept_memory(), own_precision, train_mode(self.net, self.model):
            try:
                for t, _ in narrow:
                    t.data = t.data.float()
                for p in turned:
                    p.data = p.data.contiguous(memory_format=self.memory_format)
                self.optimizer = self._make_optimizer()
                sgd = self.settings.optimizer == "sgd"
                self.quadratics = _coefficients(self.net, MaskedPoly) if sgd else []
                self.parallel = self.model if ranks.world() == 1 else self._averaging()
                yield
            finally:
                self.net.zero_grad(set_to_none=True)
                for p in turned:
                    p.data = p.data.contiguous()
                for t, dtype in narrow:
                    t.data = t.data.to(dtype)

    def _averaging(self) -> nn.Module:
        """The model, with gradients averaged over the ranks."""
        if self.settings.sync_batch_norm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        with warnings.catch_warnings():  # its new name does something else
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            return DistributedDataParallel(
                self.model, broadcast_buffers=False, find_unused_parameters=self.model is self.net
            )

    @property
    def smallest(self) -> int:
        """The smallest batch: batch norm in train mode needs two samples on each rank."""
        norms = [m for m in self.net.modules() if isinstance(m, _BatchNorm)]
        trained = any(norm.training or not self.net.training for norm in norms)
        return 2 * ranks.world() if trained else 1

    @property
    def sizes(self) -> list[int]:
        """The sizes of an epoch's batches, over all ranks."""
        return self.data.sizes(self.settings.batch_size, self.smallest)

    def epoch(
        self, epoch: int, lr: float, *, step: int = 0, bar: Any = None,
        penalty: Callable[[], Tensor] | None = None,
        before_batch: Callable[[int], None] | None = None, share: float = 1.0,
    ) -> float:  # fmt: skip
        """Train on every sample once; returns the mean loss, with the penalty that is added to it.

        before_batch: called with the number of the batch, counted from the first epoch. share: of
        the epoch's batches, the first ones; at least one batch.
        """
        s, world, device, sizes = self.settings, ranks.world(), self.data.device, self.sizes
        count = batches_of(share, len(sizes))
        for group in self.optimizer.param_groups:
            group["lr"] = min(group.get("share", 1) * lr, group.get("most", math.inf))
        which: Any = {"seed": self.seed, "step": step, "epoch": epoch}
        which |= {"padding": s.padding, "flip": s.flip}
        logits = None  # the teacher's, of this epoch's views
        teacher = self.teacher if s.distill or s.mismatch else None
        if teacher is not None and not teacher.per_batch:
            order = self.data.order(seed=self.seed, step=step, epoch=epoch)
            part = None if count == len(sizes) else order[: sum(sizes[:count])]
            logits = teacher.epoch(self.data.view_ids(**which), part)
        amp = device.type == "cuda" if s.amp is None else s.amp
        half = torch.float16 if amp == "fp16" else torch.bfloat16
        scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        losses: list[float] = []
        pending: list[Tensor] = []  # per batch: the loss, the largest gradient of each parameter
        batches = self.data.train_batches(
            s.batch_size, rank=ranks.rank(), world=world, smallest=self.smallest,
            memory_format=self.memory_format, dtype=self.dtype, **which,
        )  # fmt: skip
        for number, (x, labels, indices, _) in enumerate(islice(batches, count)):
            if before_batch is not None:
                before_batch(epoch * len(sizes) + number)
            if teacher is not None:
                given, directions = teacher.of(x) if logits is None else (logits[indices], [])
            with torch.autocast(device.type, half, enabled=bool(amp)), ExitStack() as stack:
                if s.mismatch:
                    seen = stack.enter_context(site_outputs(self.model))
                outputs = self.parallel(x)
            torch.clear_autocast_cache()  # of weights, which only the outermost autocast clears
            outputs = tree_map_only(Tensor, at_least_float32, outputs)
            loss = (self.loss or F.cross_entropy)(outputs, labels).mean()
            if teacher is not None and s.distill:
                loss = loss + distillation(outputs, given, s.temperature, s.distill)
            if s.mismatch:
                loss = loss + s.mismatch / 2 * mismatch(seen, directions)
            # This rank holds len(x) of the batch's samples; gradients are averaged over ranks.
            loss = loss if world == 1 else loss * (world * len(x) / sizes[number])
            loss = loss if penalty is None else loss + penalty()
            self.optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(self.optimizer)
            # Of each batch alone, so that a resumed training has the same bounds.
            bounds = [c.detach()[2].abs().clamp(min=SQUARES_MOST) for c in self.quadratics]
            for coef in self.quadratics:
                if coef.grad is not None:
                    coef.grad[2] *= SQUARES
            grads = (p.new_zeros(()) if p.grad is None else p.grad for p in self.trained.values())
            largest = _largest(grads)
            if scaler.is_enabled():  # which leaves out batches whose gradients are not finite
                largest = largest.nan_to_num(posinf=0.0)
            pending.append(torch.cat([loss.detach().double()[None] / world, largest]))
            if len(pending) == CHECK_EVERY:  # it waits for the GPU
                losses += self._losses(pending, len(losses), f"{epoch}, batch {{}}, step {step}")
                pending = []
            if s.clip:
                nn.utils.clip_grad_norm_(self.trained.values(), s.clip)
            scaler.step(self.optimizer)
            scaler.update()
            for coef, most in zip(self.quadratics, bounds, strict=True):
                coef.data[2].clamp_(-most, most)
            if bar is not None:
                bar.update()
        if pending:
            losses += self._losses(pending, len(losses), f"{epoch}, batch {{}}, step {step}")
        # Statistics of batch norm: each rank saw its own images. Frozen ones stay as they are.
        trained = (module for module in self.net.modules() if module.training)
        ranks.agree(b for module in trained for b in module.buffers(recurse=False))
        if scaler.is_enabled() and scaler.get_scale() < 1:
            raise FloatingPointError(
                f"float16 gradients overflow at any scale in epoch {epoch}, step {step}; use "
                f"amp=True (bfloat16), or look at the range of the activations"
            )
        weights = _largest(p.detach() for p in self.trained.values()).tolist()
        names = (f"weight {name}" for name in self.trained)
        _check_finite(weights, names, f"{epoch}, after the last batch, step {step}")
        return sum(map(operator.mul, losses, sizes)) / sum(sizes[: len(losses)])

    def _losses(self, pending: list[Tensor], first: int, where: str) -> list[float]:
        """The losses of some batches; FloatingPointError if one or a gradient is not finite."""
        table = torch.stack(pending)
        losses = ranks.all_sum(table[:, 0]).tolist()
        gradients = [f"gradient of {name}" for name in self.trained]
        for i, (loss, row) in enumerate(zip(losses, table[:, 1:].tolist(), strict=True)):
            _check_finite([loss, *row], [f"loss ({loss})", *gradients], where.format(first + i))
        return losses

    def _make_optimizer(self) -> torch.optim.Optimizer:
        s, trained = self.settings, list(self.trained.values())
        quadratics, lines = (_coefficients(self.net, kind) for kind in (MaskedPoly, MaskedLine))
        weights = [p for p in trained if all(p is not coef for coef in quadratics + lines)]
        groups: list[dict[str, Any]] = [{"params": trained}]
        if s.optimizer == "muon":
            groups = [{"params": [p for p in weights if p.ndim > 1]}]
            vectors = [p for p in weights if p.ndim < 2] + lines
            groups.append({"params": vectors, "adam": True, "share": VECTORS})
            slow = {"share": VECTORS, "most": QUADRATICS_MOST}
            groups.append({"params": quadratics, "adam": True, **slow})
            return Muon([g for g in groups if g["params"]], lr=s.lr, momentum=s.momentum)
        if (coefs := quadratics + lines) and s.optimizer == "sgd":
            groups = [{"params": weights}]
            groups.append({"params": coefs, "weight_decay": 0.0, "share": COEFFICIENTS})
        # One kernel for all parameters, where torch has it for their device and dtype.
        possible = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
        one_kernel = True if self.fused_optimizer and possible else None
        options: Any = {"lr": s.lr, "weight_decay": s.weight_decay, "fused": one_kernel}
        if s.optimizer == "adam":
            return torch.optim.Adam(groups, **options)
        return torch.optim.SGD(groups, momentum=s.momentum, **options)

    def state(self) -> dict[str, Tensor]:
        """Copies of the net's and the optimizer's tensors, on the CPU."""
        net, optimizer = snapshots.take(self.net), self.optimizer_state()
        return with_prefix(net, NET) | with_prefix(optimizer, OPTIMIZER)

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; tensors with another prefix are ignored."""
        snapshots.restore(self.net, without_prefix(state, NET))
        self.load_optimizer(without_prefix(state, OPTIMIZER))

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's tensors, named kind.parameter, such as exp_avg.conv.weight."""
        return {
            f"{kind}.{name}": value.detach().cpu().contiguous().clone()
            for name, p in self.trained.items()
            for kind, value in self.optimizer.state.get(p, {}).items()
            if value is not None
        }

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `optimizer_state` returned."""
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            p = self.trained[name]
            # A moment has its parameter's memory format; Adam's step is a single number.
            moment = torch.empty_like(p, requires_grad=False)
            self.optimizer.state[p][kind] = value.clone() if kind == "step" else moment.copy_(value)


class Finetuner(Trainer):
    """Fine-tunes one net again and again; the teacher's logits are cached between the runs.

    The same weights, masks, seed and step give the same weights to the last bit on the same
    machine. Frozen parameters stay as they are. A module in eval mode inside a net in train mode
    is frozen too (`net.train(); net.bn.eval()`): a batch norm keeps its running statistics. A
    net that is in eval mode itself is trained as a whole, with batch norm in train mode.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> tuner = Finetuner(net, data, fastbcd.Finetune(epochs=2, padding=1))
    >>> sorted(tuner.run(step=0))
    ['epochs', 'loss', 'seconds', 'teacher_seconds']
    """

    def run(
        self, step: int, *, epochs: float | None = None, rates: Sequence[float] | None = None,
        progress: bool = False, bar: Any = None,
    ) -> dict[str, float]:  # fmt: skip
        """Train the net in place, with a new optimizer and the cosine from its start.

        epochs: in place of settings.epochs; the cosine then spans that many. Of the last epoch of a
        fraction, a part of the batches is used. rates: the learning rate of each epoch, in place of
        the cosine. bar: a tqdm to update after each batch, in place of the bar that `progress`
        shows.

        Returns the mean loss of the last epoch (if there is one), the seconds, the part of them
        spent on the teacher's logits, and the epochs. Afterwards every module is in the mode it
        was in, and all ranks hold the same weights and buffers. Raises FloatingPointError if a
        loss, a gradient or a weight is not finite; the net then keeps its current weights.
        """
        epochs = self.settings.epochs if epochs is None else epochs
        check_number("epochs", epochs, 0)
        shares = epoch_shares(epochs)
        if rates is None:
            rates = [cosine(self.settings.lr, epoch, epochs) for epoch in range(len(shares))]
        check_whole("step", step, 0)
        start, before = time.perf_counter(), self.teacher.seconds if self.teacher else 0.0
        batches = sum(batches_of(share, len(self.sizes)) for share in shares)
        result = {"epochs": float(epochs)}
        hidden = not progress or ranks.rank() > 0 or bar is not None
        own = tqdm(total=batches, desc="fine-tune", leave=False, disable=hidden)
        pinned = repeatable(self.data.device, self.seed, step, self.settings.fast)
        with own, self.session(), pinned:
            for epoch, (share, lr) in enumerate(zip(shares, rates, strict=True)):
                result["loss"] = self.epoch(
                    epoch, lr, step=step, bar=own if bar is None else bar, share=share
                )
        result["teacher_seconds"] = self.teacher.seconds - before if self.teacher else 0.0
        return {**result, "seconds": time.perf_counter() - start}


def training_dtype(net: nn.Module) -> torch.dtype:
    """The dtype that a net is trained in: float64 if it has it, else float32."""
    return torch.promote_types(dtype_of(net), torch.float32)


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with `prefix` before their names."""
    return {prefix + name: t for name, t in tensors.items()}


def without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with `prefix`, under the rest of the name."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def epoch_shares(epochs: float) -> list[float]:
    """The share of each epoch's batches that a number of epochs takes: all, and the rest.

    >>> epoch_shares(2.25), epoch_shares(1), epoch_shares(0)
    ([1.0, 1.0, 0.25], [1.0], [])
    """
    whole = math.floor(epochs + 1e-9)
    return [1.0] * whole + [epochs - whole] * (epochs - whole > 1e-9)


def batches_of(share: float, batches: int) -> int:
    """How many of an epoch's batches a share of it takes: at least one.

    >>> [batches_of(share, 10) for share in (0.01, 0.25, 1.0)]
    [1, 2, 10]
    """
    return min(batches, max(1, round(share * batches)))


def cosine(lr: float, epoch: float, epochs: float, end: float = 0.0) -> float:
    """The rate of CosineAnnealingLR from lr to `end`, stepped once per epoch."""
    return end + (lr - end) * (1 + math.cos(math.pi * epoch / epochs)) / 2


def epoch_line(title: str, record: dict[str, Any]) -> str:
    """An epoch's record in one line: title, loss 1.5000, test 40.00 %, 3.2 s."""
    parts = [title, f"loss {record['loss']:.4f}"]
    for name, text in (("iou", "IoU {:.3f}"), ("test_accuracy", "test {:.2f} %")):
        if record.get(name) is not None:
            parts.append(text.format(record[name]))
    return ", ".join([*parts, f"{record['seconds']['epoch']:.1f} s"])


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generators; on exit, restore their states."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed & (2**63 - 1))
        yield


@contextmanager
def repeatable(device: torch.device, seed: int, number: int, fast: bool = False) -> Iterator[None]:
    """Seed torch by (seed, number, rank) and use deterministic algorithms; restored on exit.

    fast: the fastest convolutions instead.
    """
    seed = (seed * 1_000_003 + number) * 65_537 + ranks.rank()
    with fast_convolutions() if fast else _deterministic(device), seeded(device, seed):
        yield


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic convolutions; on a GPU all algorithms that torch has, with a warning else."""
    memory: Any = torch.utils.deterministic
    with repeatable_convolutions(tf32=True), ExitStack() as stack:
        if device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
            fill = memory.fill_uninitialized_memory  # it costs time
            stack.callback(setattr, memory, "fill_uninitialized_memory", fill)
            stack.callback(torch.use_deterministic_algorithms, False)
            memory.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield


def check_trainable(
    net: nn.Module, data: ImageData, settings: Finetune, teacher: nn.Module | None = None,
    loss: Loss | None = None,
) -> None:  # fmt: skip
    """Refuse settings, data, a net or a teacher that cannot be trained with."""
    if not isinstance(settings, Finetune):
        raise TypeError(f"settings are {type(settings).__name__}; expected fastbcd.Finetune")
    if not len(data):
        raise ValueError("there are no images to train on")
    data.check_views(settings.padding, settings.flip)
    if len(data) < ranks.world():
        raise ValueError(f"{len(data)} images are too few for {ranks.world()} ranks")
    check_loss(net, data, loss)
    if not any(p.requires_grad for p in net.parameters()):
        raise ValueError("the net has no parameter to train; net.requires_grad_()")
    if teacher is not None:
        own = {id(p) for p in net.parameters()}
        shared = [name for name, p in teacher.named_parameters() if id(p) in own]
        if teacher is net or shared:
            what = "is the net itself" if teacher is net else f"shares {shared[0]!r} with the net"
            raise ValueError(f"the teacher {what}; it must stay fixed: copy.deepcopy(net)")
        check_same_classes(net, data, teacher)


def check_loss(net: nn.Module, data: ImageData, loss: Loss | None) -> None:
    """Refuse a net whose outputs do not fit the loss, or the labels if that is cross-entropy."""
    if loss is None and are_indices(data.labels):
        check_classes(net, data, "the net")
        return
    outputs, criterion = first_outputs(net, data, "the net", 2), Criterion(loss=loss)
    criterion.check_targets(outputs, data.labels, "the net")
    criterion.summed_loss(outputs, next(data.batches(2))[1])


def training_record(settings: Finetune, net: nn.Module) -> dict[str, Any]:
    """What config.json has of a training: `describe`, and the learning rates of coefficients."""
    found = settings.describe()
    kinds = {type(m) for m in net.modules() if isinstance(m, MaskedLine | MaskedPoly)}
    if kinds and settings.optimizer == "sgd":  # runs begun before it lack it, or have others
        found["coefficients_lr"] = [COEFFICIENTS, SQUARES, SQUARES_MOST]
    if MaskedPoly in kinds and settings.optimizer == "muon":
        found["quadratics_lr"] = [VECTORS, QUADRATICS_MOST]
    return found


def check_same_classes(net: nn.Module, data: ImageData, teacher: nn.Module) -> None:
    """Refuse a teacher whose outputs are not logits of the net's classes."""
    who = {"the net": net, "the teacher": teacher}
    own, other = (first_outputs(module, data, name, 1) for name, module in who.items())
    if not are_logits(own, data.labels):
        raise ValueError(
            f"the teacher {type(teacher).__name__} cannot be distilled from: that needs logits "
            f"[B, classes, ...] and class indices [B, ...], but the net returns {describe(own)} "
            f"beside targets {describe(data.labels)}; use teacher=None"
        )
    if not isinstance(other, Tensor) or own.shape[1:] != other.shape[1:]:
        if isinstance(other, Tensor) and own.ndim == other.ndim == 2:
            raise ValueError(f"the teacher has {other.shape[1]} classes and the net {own.shape[1]}")
        raise ValueError(f"the teacher returns {describe(other)} and the net {describe(own)}")


def check_same_sites(net: nn.Module, data: ImageData, teacher: nn.Module) -> None:
    """Refuse a teacher whose activations cannot be compared with the net's."""
    masks(net).check_same_sites(masks(with_sites(teacher, data)).sites, "the teacher")


def _coefficients(net: nn.Module, kind: type[MaskedLine | MaskedPoly]) -> list[nn.Parameter]:
    """The trained coefficients of the activations of one kind, each once."""
    coefs = {m.coef: None for m in net.modules() if isinstance(m, kind)}
    return [coef for coef in coefs if coef.requires_grad]


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """The largest magnitude in each tensor, [n]; not finite if a value is not."""
    return torch.stack(torch._foreach_norm(list(tensors), math.inf)).double()


def _check_finite(values: Iterable[float], names: Iterable[str], where: str) -> None:
    for value, name in zip(values, names, strict=True):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} is not finite in epoch {where}; try a smaller lr, or look at the "
                f"range of the activations"
            )
