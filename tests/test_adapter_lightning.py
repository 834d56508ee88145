"""Lightning: gradients are clipped before each optimizer step."""

import warnings

import pytest
from helpers import require

torch = require("torch")

from fedclip import ZScoreClip  # noqa: E402


@pytest.mark.slow
def test_lightning_clips_saves_and_refuses_to_clip_twice(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from fedclip.adapters.lightning import LightningClipping

    class Model(LightningClipping, lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)
            self.clipper = ZScoreClip(warmup=3, max_norm=0.5)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean() * 100

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(torch.randn(32, 5))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        "max_epochs": 1,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model()
        trainer = lightning.Trainer(**options)
        trainer.fit(model, loader)
        assert model.clipper.rounds[0].steps == 8
        assert model.clipper.rounds[0].clipped > 0
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        other = Model()
        checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
        other.on_load_checkpoint(checkpoint)
        assert other.clipper.get_state() == model.clipper.get_state()
        with pytest.raises(ValueError, match="clip twice"):
            lightning.Trainer(gradient_clip_val=1.0, **options).fit(Model(), loader)
