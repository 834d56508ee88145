"""What is trained of a small BERT, and what noise leaves of it: its head, adapters, or all.

A hundred sites label sentences, each with labels in proportions of its own. The backbone has
learnt from public sentences, in which a part of the words means something else. Nothing is
downloaded: words are numbers, and the backbone is trained here. A minute on one idle core:

    pip install "fedclip[torch,peft]"
    python run.py
"""

import logging
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
# What is trained, with the learning rate and the first bound that suit it.
PARTS = {"head": (2.0, 0.3), "adapters": (1.0, 0.2), "all": (0.1, 0.1)}


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
    """Train on all sites, with noise for a budget or without; return the model."""
    noise = {} if epsilon is None else plan(epsilon, DELTA, ROUNDS, SITES).config
    config = {**noise, "start_norm": start_norm}
    server = Optimizer(lrate=1.0, modules=[["update-clip-server", config], "momentum"])
    aggregator = Aggregator.from_config({"name": "clipped-averaging"})
    settings = {"lrate": lrate, "modules": ["update-clip-client"]}
    clients = [
        TrainingManager(model, Optimizer(**settings), aggregator, site, verbose=False)
        for site in sites
    ]
    batches = {"batch_size": RECORDS}
    for i in range(ROUNDS):
        aux, weights = server.collect_aux_var(), model.get_weights(trainable=True)
        request = TrainRequest(round_i=i, weights=weights, aux_var=aux, batches=batches, n_epoch=1)
        replies = [client._training_round(request) for client in clients]
        model.set_weights(weights, trainable=True)
        votes = [reply.aux_var for reply in replies]
        server.process_aux_var({name: sum(vote[name] for vote in votes) for name in votes[0]})
        average = aggregator.finalize_updates(sum(reply.updates for reply in replies))
        server.apply_gradients(model, average)
    return model


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
    topics = rng.integers(TOPICS, size=2000)
    test, right = torch.from_numpy(sentences(rng, topics, private)), labels[topics]
    print("trained    values shared   no noise   epsilon 2")
    for trained, settings in PARTS.items():
        found = []
        for epsilon in (None, 2.0):
            model = federate(part(net, trained), sites, epsilon, *settings)
            with torch.no_grad():
                scores = model.get_wrapped_model().eval()(test)
            found.append((scores.argmax(1).numpy() == right).mean())
        shared = sum(np.prod(s) for s in model.get_weights(trainable=True).shapes().values())
        print(f"{trained:<10} {shared:>13,} {found[0]:10.3f} {found[1]:11.3f}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
