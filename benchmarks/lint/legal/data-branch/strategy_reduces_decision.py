"""The trainer's strategy reduces the decision."""

import lightning


class Stop(lightning.Callback):
    def on_validation_end(self, trainer, module):
        stop = trainer.callback_metrics["loss"] > 3
        stop = trainer.strategy.reduce_boolean_decision(stop)
        if stop:
            trainer.strategy.barrier()
