"""A small transformer of Hugging Face, with a clipper: python examples/loops/transformers_train.py.

The model is made from a configuration: nothing is downloaded.
"""

import tempfile

import task
import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from fedclip.loops.transformers import attach

SHAPE = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "initializer_range": 0.2,
}


def train():
    """Return the limits that were logged, and the accuracy."""
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SHAPE, **SIZE, num_attention_heads=2))
    images, labels = task.data()
    pixels = torch.from_numpy(images).float().reshape(-1, 1, 8, 8)
    data = [{"pixel_values": x, "labels": int(y)} for x, y in zip(pixels, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_grad_norm=0,
            num_train_epochs=8,
            per_device_train_batch_size=task.BATCH,
            learning_rate=0.005,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        callback = attach(trainer, task.clipper())
        trainer.train()
    limits = [row["limit"] for row in trainer.state.log_history if "limit" in row]
    with torch.no_grad():
        found = model.eval()(pixels).logits.argmax(1).numpy()
    accuracy = (found == labels).mean()
    clipped = sum(r.clipped for r in callback.clipper.rounds if r.group == "all")
    task.report("transformers", accuracy, limits, clipped)
    return limits, accuracy


if __name__ == "__main__":
    train()
