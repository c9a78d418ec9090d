"""Fine-tuning between two steps of BCD: cross-entropy and distillation on a cosine.

tuner = Finetuner(net, data, Finetune(epochs=20), teacher=dense)
tuner.run(step=0)                         # trains the net in place
tuner.run(step=1)                         # reuses the teacher's logits computed before
"""

from __future__ import annotations

import time

from tqdm import tqdm

from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_whole
from fastbcd.training.trainer import Trainer, cosine, repeatable


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
        self, step: int, *, epochs: int | None = None, progress: bool = False
    ) -> dict[str, float]:
        """Train the net in place, with a new optimizer and the cosine from its start.

        epochs: in place of settings.epochs; the cosine then spans that many. Returns the mean
        loss of the last epoch (if there is one), the seconds, the part of them spent on the
        teacher's logits, and the epochs. Afterwards every module is in the mode it was in, and
        all ranks hold the same weights and buffers. Raises FloatingPointError if a loss, a
        gradient or a weight is not finite; the net then keeps its current weights.
        """
        epochs = self.settings.epochs if epochs is None else epochs
        check_whole("epochs", epochs, 0)
        check_whole("step", step, 0)
        self.teacher_seconds, start = 0.0, time.perf_counter()
        result = {"epochs": float(epochs)}
        hidden = not progress or ranks.rank() > 0
        bar = tqdm(total=epochs * len(self.sizes), desc="fine-tune", leave=False, disable=hidden)
        with bar, self.session(), repeatable(self.data.device, self.seed, step):
            for epoch in range(epochs):
                lr = cosine(self.settings.lr, epoch, epochs)
                result["loss"] = self.epoch(epoch, lr, step=step, bar=bar)
        seconds = time.perf_counter() - start
        return {**result, "teacher_seconds": self.teacher_seconds, "seconds": seconds}
