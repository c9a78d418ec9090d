"""Fine-tuning between two steps of BCD: cross-entropy and distillation, cosine, written for speed.

    tuner = Finetuner(net, data, Finetune(epochs=20), teacher=dense)
    tuner.run(step=0)                                   # trains the net in place
    tuner.run(step=1)                                   # the teacher's logits are known by and by

    loss = CE(s, labels) + distill · T² · KL(softmax(t/T) ‖ softmax(s/T)),  mean over the batch

with s the net's logits and t the teacher's. The learning rate of epoch e of E is that of
CosineAnnealingLR stepped once an epoch, lr · (1 + cos(πe/E))/2, from the start in every run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.graph.fuse import fused
from fastbcd.runtime import ranks
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.scoring.accuracy import check_classes, device_of
from fastbcd.training.teacher import TeacherLogits

OPTIMIZERS = ("sgd", "adam")
LOOK_EVERY = 32  # batches between two looks at whether losses and gradients are finite


@dataclass(frozen=True)
class Finetune:
    """How to fine-tune: the paper's values for ResNet18 are the defaults.

    >>> Finetune(epochs=5, optimizer="adam", lr=3.5e-5).momentum
    0.9
    """

    epochs: int = 20
    lr: float = 1e-3
    optimizer: str = "sgd"  # or "adam", which does not look at momentum
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128  # over all ranks
    temperature: float = 4.0  # T of the distillation; used where there is a teacher
    distill: float = 1.0  # its weight
    padding: int = 4  # of the random crop
    flip: bool = True
    compile: bool = False  # torch.compile the forward and backward pass
    amp: bool | None = None  # bfloat16 autocast; None: on CUDA
    teacher_cache: int | None = None  # bytes for the teacher's logits; None: half the free memory

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
        for name, least in (("epochs", 0), ("batch_size", 1), ("padding", 0)):
            check_whole(name, getattr(self, name), least)
        if self.teacher_cache is not None:
            check_whole("teacher_cache", self.teacher_cache, 0)
        for name in ("lr", "momentum", "weight_decay", "temperature", "distill"):
            check_number(name, getattr(self, name), 0)
        if self.momentum >= 1:
            raise ValueError(f"momentum={self.momentum}; it must be below 1")
        if self.temperature == 0:
            raise ValueError("temperature=0; it must be positive, the paper's is 4")
        for name in ("flip", "compile", "amp"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "amp" and value is None):
                raise TypeError(f"{name}={value!r}; it must be True or False")


class Finetuner:
    """What a run holds: the net, its data, the settings, and the teacher's logits.

    Same weights, masks, seed and step: the same weights to the last bit, on the same machine.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> tuner = Finetuner(net, data, Finetune(epochs=2, padding=1))
    >>> sorted(tuner.run(step=0))
    ['epochs', 'loss', 'seconds', 'teacher_seconds']
    """

    def __init__(
        self,
        net: nn.Module,
        data: Any,
        settings: Finetune,
        teacher: nn.Module | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.net, self.settings, self.seed = net, settings, seed
        self.data: ImageData = as_data(data)
        if not isinstance(settings, Finetune):
            raise TypeError(f"settings are {type(settings).__name__}; expected fastbcd.Finetune")
        if not len(self.data):
            raise ValueError("there are no images to fine-tune on")
        if len(self.data) < ranks.world():
            raise ValueError(f"{len(self.data)} images do not reach for {ranks.world()} ranks")
        classes = check_classes(net, self.data, "the net")
        if not any(p.requires_grad for p in net.parameters()):
            raise ValueError("the net has no parameter to train; net.requires_grad_()")
        self.teacher: TeacherLogits | None = None
        if teacher is not None:
            _check_teacher(net, teacher, self.data, classes)
        if teacher is not None and settings.distill:
            self.teacher = TeacherLogits(
                teacher, self.data, padding=settings.padding, flip=settings.flip,
                limit=settings.teacher_cache,
            )  # fmt: skip
        self.model, self.memory_format = fused(net)
        if settings.compile:
            self.model.compile()

    def run(
        self, step: int, *, epochs: int | None = None, progress: bool = False
    ) -> dict[str, float]:
        """One fine-tune: a fresh optimizer, the cosine from its start; the net is trained in place.

        epochs: instead of settings.epochs, the cosine then spans as many. Returned are the last
        epoch's mean loss (if there was one), the seconds, those for the teacher's logits among
        them, and the epochs. Afterwards every module is in the mode it was in, and all ranks hold
        the same weights and buffers. Raises FloatingPointError, with the net left as it then is,
        when a loss or a gradient is not finite.
        """
        epochs = self.settings.epochs if epochs is None else epochs
        check_whole("epochs", epochs, 0)
        check_whole("step", step, 0)
        start = time.perf_counter()
        result = {"seconds": 0.0, "teacher_seconds": 0.0, "epochs": float(epochs)}
        with ExitStack() as stack:
            stack.enter_context(kept_memory())
            stack.enter_context(training_mode(self.net, self.memory_format))
            stack.enter_context(repeatable(self.data.device, self.seed, step))
            model = self.distributed()
            optimizer = make_optimizer(self.net, self.settings)
            batches = epochs * math.ceil(len(self.data) / self.settings.batch_size)
            quiet = not progress or ranks.rank() > 0
            bar = stack.enter_context(
                tqdm(total=batches, desc="fine-tune", leave=False, disable=quiet)
            )
            for epoch in range(epochs):
                for group in optimizer.param_groups:
                    group["lr"] = self.settings.lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
                begin = time.perf_counter()
                targets = self._targets(step, epoch)
                result["teacher_seconds"] += time.perf_counter() - begin
                result["loss"] = self.epoch(model, optimizer, step, epoch, targets, bar)
            self.share_buffers()
        result["seconds"] = time.perf_counter() - start
        return result

    def distributed(self) -> nn.Module:
        """The net rewritten for training; with several ranks it averages their gradients."""
        self.model.train()
        if ranks.world() == 1:
            return self.model
        return DistributedDataParallel(
            self.model, broadcast_buffers=False, find_unused_parameters=self.model is self.net
        )

    def _targets(self, step: int, epoch: int) -> Tensor | None:
        """The teacher's log-probabilities at temperature T for this epoch's views, [N, classes]."""
        if self.teacher is None:
            return None
        s = self.settings
        views = self.data.view_ids(
            seed=self.seed, step=step, epoch=epoch, padding=s.padding, flip=s.flip
        )
        return F.log_softmax(self.teacher.epoch(views) / s.temperature, 1)

    def epoch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        epoch: int,
        targets: Tensor | None,
        bar: Any,
    ) -> float:
        """Train on every sample once; the mean loss."""
        s, world = self.settings, ranks.world()
        watch = _Watch(self.net, f"step {step}, epoch {epoch}")
        amp = self.data.device.type == "cuda" if s.amp is None else s.amp
        batches = self.data.train_batches(
            s.batch_size, seed=self.seed, step=step, epoch=epoch, padding=s.padding, flip=s.flip,
            rank=ranks.rank(), world=world, memory_format=self.memory_format,
        )  # fmt: skip
        for batch, (x, labels, indices, _) in enumerate(batches):
            with torch.autocast(self.data.device.type, torch.bfloat16, enabled=amp):
                logits = model(x)
            target = None if targets is None else targets[indices]
            loss = loss_of(logits.float(), labels, target, s.temperature, s.distill)
            # The mean over the whole batch, of which this rank has len(x) samples; the gradients
            # are averaged over ranks.
            whole = min(s.batch_size, len(self.data) - batch * s.batch_size)
            loss = loss if world == 1 else loss * (world * len(x) / whole)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            watch.note(loss.detach() / world, whole)
            optimizer.step()
            bar.update()
        return watch.mean_loss()

    def share_buffers(self) -> None:
        """Each rank has measured batch-norm statistics on its own share: the first's are kept."""
        if ranks.world() > 1:
            for buffer in self.net.buffers():
                buffer.copy_(ranks.from_first(buffer))


def loss_of(
    logits: Tensor, labels: Tensor, target: Tensor | None, temperature: float, weight: float
) -> Tensor:
    """CE + weight·T²·KL(target ‖ softmax(logits/T)), mean over the batch; target in logarithms."""
    loss = F.cross_entropy(logits, labels)
    if target is None:
        return loss
    student = F.log_softmax(logits / temperature, 1)
    divergence = F.kl_div(student, target, reduction="batchmean", log_target=True)
    return loss + weight * temperature**2 * divergence


class _Watch:
    """Notes each batch's loss and largest gradients; now and then looks whether all are finite.

    A look waits for the GPU, so there is not one for every batch.
    """

    def __init__(self, net: nn.Module, where: str) -> None:
        self.where = where
        trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self.names, self.parameters = zip(*trained, strict=True)
        self.noted: list[tuple[Tensor, list[str], tuple[Tensor, ...]]] = []
        self.seen, self.total, self.samples = 0, 0.0, 0
        self.weights: list[int] = []

    def note(self, loss: Tensor, samples: int) -> None:
        """After backward, before the optimizer's step."""
        present = [(n, p.grad) for n, p in zip(self.names, self.parameters, strict=True)
                   if p.grad is not None]  # fmt: skip
        largest = torch._foreach_norm([g for _, g in present], math.inf)
        self.noted.append((loss, [n for n, _ in present], largest))
        self.weights.append(samples)
        if len(self.noted) == LOOK_EVERY:
            self.look()

    def look(self) -> None:
        if not self.noted:
            return
        losses = ranks.all_sum(torch.stack([loss for loss, _, _ in self.noted])).tolist()
        for i, (loss, (_, names, largest)) in enumerate(zip(losses, self.noted, strict=True)):
            what = None if math.isfinite(loss) else f"the loss ({loss})"
            if what is None and not all(torch.stack(largest).isfinite().tolist()):
                bad = next(n for n, g in zip(names, largest, strict=True) if not g.isfinite())
                what = f"the gradient of {bad}"
            if what is not None:
                raise FloatingPointError(
                    f"{what} is not finite in {self.where}, batch {self.seen + i}; "
                    f"try a smaller lr, or look at the range of the activations"
                )
        self.total += sum(a * w for a, w in zip(losses, self.weights, strict=True))
        self.samples += sum(self.weights)
        self.seen += len(self.noted)
        self.noted.clear()
        self.weights.clear()

    def mean_loss(self) -> float:
        self.look()
        return self.total / self.samples


def make_optimizer(net: nn.Module, s: Finetune) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    # One kernel for all parameters, where torch has it for their device and dtype.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
    if s.optimizer == "adam":
        return torch.optim.Adam(trained, s.lr, weight_decay=s.weight_decay, fused=fused)
    return torch.optim.SGD(
        trained, s.lr, momentum=s.momentum, weight_decay=s.weight_decay, fused=fused
    )


@contextmanager
def training_mode(net: nn.Module, memory_format: torch.memory_format) -> Iterator[None]:
    """The net in train mode and in that format; afterwards modes and memory are as before."""
    modes = {module: module.training for module in net.modules()}
    plain = [p for p in net.parameters() if p.ndim == 4 and p.is_contiguous()]
    net.train()
    try:
        for p in plain:
            p.data = p.data.contiguous(memory_format=memory_format)
        yield
    finally:
        for p in plain:
            p.data = p.data.contiguous()
        net.zero_grad(set_to_none=True)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def repeatable(device: torch.device, seed: int, step: int) -> Iterator[None]:
    """Random numbers (dropout) that depend on seed, step and rank; convolutions that repeat."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=True
        ),
    ):
        torch.manual_seed((seed * 1_000_003 + step) * 65_537 + ranks.rank() & (2**63 - 1))
        yield


def _check_teacher(net: nn.Module, teacher: nn.Module, data: ImageData, classes: int) -> None:
    """Refuse a teacher that cannot teach this net."""
    own = {id(p) for p in net.parameters()}
    shared = next((name for name, p in teacher.named_parameters() if id(p) in own), None)
    if teacher is net or shared is not None:
        what = "is the net itself" if teacher is net else f"shares {shared!r} with the net"
        raise ValueError(f"the teacher {what}; it must stay fixed: copy.deepcopy(net)")
    if (device := device_of(teacher)) not in (None, data.device):
        raise ValueError(
            f"the teacher is on {device} and the data on {data.device}; teacher.to(device)"
        )
    found = check_classes(teacher, data, "the teacher")
    if found != classes:
        raise ValueError(f"the teacher has {found} classes and the net {classes}")
