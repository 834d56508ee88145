"""Transformers: gradients are clipped before each optimizer step of a Trainer."""

import warnings

import pytest
from helpers import require

torch = require("torch")

from fedclip import NormClip, ZScoreClip  # noqa: E402


@pytest.mark.slow
def test_transformers_callback(tmp_path):
    transformers = pytest.importorskip("transformers")
    from fedclip.adapters.transformers import ClipCallback

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean() * 100}

    data = [{"x": torch.randn(3)} for _ in range(16)]

    def arguments(**more):
        return transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            **more,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = ClipCallback(ZScoreClip(warmup=2, max_norm=0.5))
        model = Model()
        trainer = transformers.Trainer(
            model, arguments(max_grad_norm=0.0), train_dataset=data, callbacks=[callback]
        )
        trainer.train()
        assert callback.clipper.rounds[0].steps == 4
        state = callback.state()
        again = ClipCallback(**state["args"])
        for key, value in state["attributes"].items():
            setattr(again, key, value)
        assert again.clipper.get_state() == callback.clipper.get_state()
        with pytest.raises(ValueError, match="max_grad_norm=0"):
            transformers.Trainer(
                Model(), arguments(), train_dataset=data, callbacks=[ClipCallback(NormClip(1.0))]
            ).train()
