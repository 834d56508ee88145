"""The shapes of the gradients that are measured: well-known models, and what is hard for clippers.

The shapes are written out, so that nothing is downloaded. Tests compare the number of tensors
and of values with the published ones.
"""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def mlp() -> Iterator[Shape]:
    """Yield the shapes of a multilayer perceptron for MNIST, 784-256-128-10."""
    for inputs, outputs in ((784, 256), (256, 128), (128, 10)):
        yield from ((outputs, inputs), (outputs,))


def lstm() -> Iterator[Shape]:
    """Yield the shapes of LEAF's next-character model for Shakespeare: two LSTM layers of 256."""
    yield 80, 8
    for inputs in (8, 256):
        yield from ((1024, inputs), (1024, 256), (1024,), (1024,))
    yield from ((80, 256), (80,))


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of torchvision's ResNet-50: bottlenecks of 3, 4, 6 and 3."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from ((width, inputs, 1, 1), (width,), (width,))
            yield from ((width, width, 3, 3), (width,), (width,))
            yield from ((4 * width, width, 1, 1), (4 * width,), (4 * width,))
            if not block:
                yield from ((4 * width, inputs, 1, 1), (4 * width,), (4 * width,))
            inputs = 4 * width
    yield from ((1000, 2048), (1000,))


def vit_s() -> Iterator[Shape]:
    """Yield the shapes of timm's ViT-S/16: 12 blocks of width 384."""
    yield from ((1, 1, 384), (1, 197, 384), (384, 3, 16, 16), (384,))
    for _ in range(12):
        yield from ((384,), (384,), (1152, 384), (1152,), (384, 384), (384,))
        yield from ((384,), (384,), (1536, 384), (1536,), (384, 1536), (384,))
    yield from ((384,), (384,), (1000, 384), (1000,))


def bert_base() -> Iterator[Shape]:
    """Yield the shapes of BERT-base, uncased, without its pooler: 12 layers of width 768."""
    yield from ((30522, 768), (512, 768), (2, 768), (768,), (768,))
    for _ in range(12):
        yield from ((768, 768), (768,)) * 4
        yield from ((768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,))


MODELS: dict[str, list[Shape]] = {
    "MLP": [*mlp()],
    "LSTM": [*lstm()],
    "ResNet-50": [*resnet50()],
    "ViT-S": [*vit_s()],
    "BERT-base": [*bert_base()],
}
ALIKE: dict[str, list[Shape]] = {
    "40 tensors, 21M": [(525_000,)] * 40,
    "200 tensors, 3.7M": [(136, 136)] * 200,
    "20 tensors, 2.7k": [(135,)] * 20,
}
"""Tensors of one size: many of them, large and small."""

GRADIENTS = MODELS | ALIKE
