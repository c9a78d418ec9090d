"""Finetuner: trains one net again and again, for the epochs of a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastbcd.runs.step import Epoch, timed
from fastbcd.runtime.show import bar
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.training.loop import Trainer
from fastbcd.training.rates import batches_of, cosine, epoch_shares
from fastbcd.training.repeat import repeatable


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
    ['epochs', 'loss', 'seconds']
    """

    def run(
        self,
        step: int,
        *,
        epochs: float | None = None,
        rates: Sequence[float] | None = None,
        progress: bool = False,
        report: Callable[[Epoch], Any] | None = None,
    ) -> dict[str, float]:
        """Train the net in place, with a new optimizer and the cosine from its start.

        Args:
            step: selects the random crops and flips.
            epochs: in place of settings.epochs; the cosine then spans that many. Of the last epoch
                of a fraction, a part of the batches is used.
            rates: the learning rate of each epoch, in place of the cosine.
            progress: show a bar. report: called with the record of each epoch.

        Returns the mean loss of the last epoch (if there is one), the seconds, and the epochs.
        Afterwards every module is in the mode it was in, and all ranks hold the same weights and
        buffers. Raises FloatingPointError if a loss, a gradient or a weight is not finite; the net
        then keeps its current weights.
        """
        check_whole("step", step, 0)
        if epochs is None:
            epochs = self.settings.epochs
        check_number("epochs", epochs, 0)
        shares = epoch_shares(epochs)
        if rates is None:
            rates = [
                cosine(self.settings.lr, epoch, epochs) for epoch in range(len(shares))
            ]
        batches = sum(batches_of(share, len(self.sizes)) for share in shares)
        batch_bar = bar(progress, total=batches, desc="fine-tune", leave=False)
        begin = time.perf_counter()
        result = {"epochs": float(epochs)}
        algorithms = repeatable(self.data.device, self.seed, step, self.settings.fast)
        with batch_bar, self.session() as session, algorithms:
            for epoch, (share, lr) in enumerate(zip(shares, rates, strict=True)):
                record = Epoch(number=epoch + 1, epoch=epoch, phase="finetune", lr=lr)
                with timed(record.seconds, "epoch"):
                    record.loss = session.epoch(
                        epoch, lr, step=step, share=share, bar=batch_bar
                    )
                result["loss"] = record.loss
                if report is not None:
                    report(record)
        result["seconds"] = time.perf_counter() - begin
        return result
