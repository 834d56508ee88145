"""What is trained of a small BERT, and what noise leaves of it: its head, adapters, or all.

A hundred sites label sentences, each with labels in proportions of its own. The backbone has
learnt from public sentences, in which a part of the words means something else. Nothing is
downloaded: words are numbers, and the backbone is trained here. A minute or two on one idle core:

    pip install "fedclip[torch,peft]"
    python run.py

It tests on sentences that no setting was chosen by. `python run.py tune` tries settings on other
ones, which takes some minutes; `python run.py head`, or `tune head`, is about the head alone.
"""

import itertools
import logging
import sys
import time
import warnings

import numpy as np
import peft
import torch
from declearn.aggregator import Aggregator
from declearn.dataset import InMemoryDataset
from declearn.messaging import TrainRequest
from declearn.model.torch import TorchModel
from declearn.optimizer import Optimizer
from declearn.training import TrainingManager
from declearn.utils import set_device_policy
from transformers import BertConfig, BertForSequenceClassification

import fedclip  # noqa: F401  (registers the plug-ins)
from fedclip.privacy.planning import plan

WORDS, TOPICS, LABELS, LENGTH = 40, 8, 4, 12
SITES, RECORDS, ROUNDS, DELTA = 100, 32, 15, 1e-3
# What is trained, with a learning rate and a first bound that suit it.
PARTS = {"head": (0.5, 0.1), "adapters": (1.0, 0.2), "all": (0.1, 0.1)}
RATES, BOUNDS = (0.1, 0.5, 2.0), (0.1, 0.3)


class Bert(BertForSequenceClassification):
    """A BERT that returns scores, as declearn's models do."""

    def forward(self, sentences):
        return super().forward(input_ids=sentences).logits


def sentences(rng, topics, meaning):
    """Return a sentence of each topic: half of its words are of that topic."""
    words = rng.integers(WORDS, size=(len(topics), LENGTH))
    of_topic = np.stack([np.flatnonzero(meaning == topic) for topic in range(TOPICS)])
    right = of_topic[topics[:, None], rng.integers(WORDS // TOPICS, size=words.shape)]
    return np.where(rng.random(words.shape) < 0.5, right, words)


def backbone(rng, meaning):
    """Return a BERT that tells the topics of public sentences."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 64, "max_position_embeddings": LENGTH}
    config = BertConfig(vocab_size=WORDS, **size)
    config.num_labels = TOPICS
    net = Bert(config)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(200):
        topics = rng.integers(TOPICS, size=64)
        scores = net(torch.from_numpy(sentences(rng, topics, meaning)))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(topics)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def part(net, trained):
    """Return a copy of the backbone with a new head, and what is to be trained of it."""
    config = net.config
    config.num_labels = LABELS
    copy = Bert(config)
    copy.bert.load_state_dict(net.bert.state_dict())
    if trained == "head":
        copy.bert.requires_grad_(False)
    elif trained == "adapters":
        settings = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
        copy = peft.get_peft_model(copy, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    return TorchModel(copy, torch.nn.CrossEntropyLoss())


def federate(model, sites, epsilon, lrate, start_norm):
    """Train on all sites, with noise for a budget or without; return the model, and `missed`."""
    noise = {} if epsilon is None else plan(epsilon, DELTA, ROUNDS, SITES).config
    config = {**noise, "start_norm": start_norm}
    server = Optimizer(lrate=1.0, modules=[["update-clip-server", config], "momentum"])
    aggregator = Aggregator.from_config({"name": "clipped-averaging"})
    settings = {"lrate": lrate, "modules": ["update-clip-client"]}
    clients = [
        TrainingManager(model, Optimizer(**settings), aggregator, site, verbose=False)
        for site in sites
    ]
    batches, misses = {"batch_size": RECORDS}, []
    for i in range(ROUNDS):
        aux, weights = server.collect_aux_var(), model.get_weights(trainable=True)
        request = TrainRequest(round_i=i, weights=weights, aux_var=aux, batches=batches, n_epoch=1)
        replies, ends = [], []
        for client in clients:
            replies.append(client._training_round(request))
            ends.append(model.get_weights(trainable=True))
        misses.append(missed(weights.coefs, [end.coefs for end in ends]))
        model.set_weights(weights, trainable=True)
        votes = [reply.aux_var for reply in replies]
        server.process_aux_var({name: sum(vote[name] for vote in votes) for name in votes[0]})
        average = aggregator.finalize_updates(sum(reply.updates for reply in replies))
        server.apply_gradients(model, average)
    return model, np.mean(misses)


def missed(start, ends):
    """Return how far mean(B) mean(A) is from the mean of BA, as a share of that one's change."""
    gap = change = 0.0
    for a in (name for name in start if "lora_A" in name):
        b = a.replace("lora_A", "lora_B")
        product = torch.stack([end[b] @ end[a] for end in ends]).mean(0)
        averages = [torch.stack([end[name] for end in ends]).mean(0) for name in (b, a)]
        gap += float((product - averages[0] @ averages[1]).square().sum())
        change += float((product - start[b] @ start[a]).square().sum())
    return (gap / change) ** 0.5 if change else 0.0


def accuracy(model, test, right):
    """Return the share of sentences that a model labels right."""
    with torch.no_grad():
        scores = model.get_wrapped_model().eval()(test)
    return (scores.argmax(1).numpy() == right).mean()


def main():
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    set_device_policy(gpu=False)
    torch.manual_seed(0)
    began, rng = time.monotonic(), np.random.default_rng(0)
    public = np.arange(WORDS) % TOPICS
    private = public.copy()
    # Of each topic, two words of five mean another one at the sites.
    private[: 2 * TOPICS] = (public[: 2 * TOPICS] + 3) % TOPICS
    net, labels = backbone(rng, public), np.arange(TOPICS) % LABELS
    sites = []
    for _ in range(SITES):
        topics = rng.choice(TOPICS, size=RECORDS, p=rng.dirichlet([0.5] * TOPICS))
        sites.append(InMemoryDataset(sentences(rng, topics, private), target=labels[topics]))
    # The first sentences are to choose settings by, the second ones to test on.
    known, held_out = [
        (torch.from_numpy(sentences(rng, topics, private)), labels[topics])
        for topics in rng.integers(TOPICS, size=(2, 2000))
    ]
    parts = [name for name in PARTS if name in sys.argv] or [*PARTS]
    if "tune" in sys.argv:
        for trained, rate, bound in itertools.product(parts, RATES, BOUNDS):
            torch.manual_seed(0)
            model, _ = federate(part(net, trained), sites, 2.0, rate, bound)
            score = accuracy(model, *known)
            print(f"{trained:<10} {rate:>5} {bound:>5} {score:10.3f}", flush=True)
        return
    print("trained    values shared   no noise   epsilon 2")
    for trained in parts:
        torch.manual_seed(0)
        plain, miss = federate(part(net, trained), sites, None, *PARTS[trained])
        noised, _ = federate(part(net, trained), sites, 2.0, *PARTS[trained])
        found = [accuracy(model, *held_out) for model in (plain, noised)]
        shared = sum(np.prod(s) for s in noised.get_weights(trainable=True).shapes().values())
        print(f"{trained:<10} {shared:>13,} {found[0]:10.3f} {found[1]:11.3f}")
        if miss:
            print(f"    (without noise, averages of A and B miss the mean of BA by {miss:.0%})")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
