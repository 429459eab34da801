"""The callback with the Trainer of transformers."""

from __future__ import annotations

import pytest
import torch

import laplace_plus as lp
from laplace_plus.errors import UnsupportedError

pytest.importorskip("transformers", reason="needs the extra `huggingface`")
pytest.importorskip("accelerate", reason="needs the extra `huggingface`")
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from laplace_plus.integrations.transformers import LaplaceCallback, ShiftedLabels, predict_texts

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=12, num_labels=3, **SIZES)
    return transformers.BertForSequenceClassification(config)


def examples(n=40):
    ids = torch.randint(3, 50, (n, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.float().mean(1).div(17).long()
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": y} for i, y in zip(ids, labels, strict=True)
    ]


def trainer(tmp_path, model, dataset, *callbacks, **options):
    options = {"num_train_epochs": 1, "save_strategy": "no", "learning_rate": 1e-2} | options
    own = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = transformers.TrainingArguments(per_device_train_batch_size=8, **own, **options)
    return transformers.Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=list(callbacks))


def batches(dataset):
    return torch.utils.data.DataLoader(dataset, batch_size=8)


def test_the_posterior_is_that_of_the_library_and_lies_beside_the_model(tmp_path):
    model, callback = classifier(), LaplaceCallback()
    runner = trainer(tmp_path, model, examples(), callback)
    runner.train()
    runner.save_model()
    expected = lp.KFAC(model, "classification", parameters="last_layer").fit(batches(examples())).fit_prior_precision()
    inputs = {name: values for name, values in next(iter(batches(examples()))).items() if name != "labels"}
    mean = callback.posterior.predictive(inputs).mean
    assert callback.posterior.n_data == 40
    torch.testing.assert_close(mean, expected.predictive(inputs).mean)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(lp.load(tmp_path / "posterior", again).predictive(inputs).mean, mean)


def test_training_is_as_without_the_callback(tmp_path):
    found = []
    for callbacks in ([], [LaplaceCallback(posterior="Diagonal", folder=None)]):
        model = classifier()
        trainer(tmp_path / str(len(callbacks)), model, examples(), *callbacks, seed=3).train()
        found.append((torch.get_rng_state(), torch.tensor(model.training), *model.state_dict().values()))
    assert all(map(torch.equal, *found))
    assert not (tmp_path / "1" / "posterior").exists()


def test_labels_of_causal_models_are_shifted(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config = transformers.GPT2Config(vocab_size=20, bos_token_id=0, eos_token_id=0, **sizes)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 20, (16, 6))
    dataset = [{"input_ids": i, "labels": i.clone()} for i in ids]
    callback = LaplaceCallback(posterior="Diagonal", data=batches(dataset))
    trainer(tmp_path, model, dataset, callback).train()
    shifted = [(ids[i : i + 8], torch.cat([ids[i : i + 8, 1:], ids.new_full((8, 1), -100)], 1)) for i in (0, 8)]
    by_name = [{"input_ids": x, "labels": y} for x, y in shifted]
    expected = lp.Diagonal(model, "classification", parameters="last_layer").fit(by_name)
    expected.prior_precision = callback.posterior.prior_precision
    callback.posterior.covariance_scale = 1.0
    torch.testing.assert_close(callback.posterior.variance(), expected.variance())
    logits = model.eval()(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat([y for _, y in shifted]).flatten())
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
    assert len(list(ShiftedLabels(by_name))) == 2


def test_texts_become_predictions(tmp_path):
    words = {"[PAD]": 0, "[UNK]": 1, "good": 5, "bad": 6}
    own = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]")
    posterior = lp.KFAC(classifier(), "classification", parameters="last_layer").fit(batches(examples()))
    found = predict_texts(posterior, tokenizer, ["good good", "bad"])
    encoded = {"input_ids": torch.tensor([[5, 5], [6, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    torch.testing.assert_close(found.mean, posterior.predictive(encoded).mean)


def test_several_processes_are_refused_before_they_train():
    class Arguments:
        world_size = 2

    with pytest.raises(UnsupportedError, match="one process"):
        LaplaceCallback().on_train_begin(Arguments(), None, None)


def test_the_smoothing_of_training_is_that_of_the_likelihood(tmp_path):
    options = {"label_smoothing_factor": 0.2}
    callback = LaplaceCallback(folder=None)
    trainer(tmp_path, classifier(), examples(), callback, **options).train()
    assert callback.posterior.likelihood == lp.Categorical(label_smoothing=0.2)
    given = LaplaceCallback(lp.Categorical(), folder=None)
    with pytest.warns(UserWarning, match=r"loss of training was that of .*label_smoothing=0\.2"):
        trainer(tmp_path, classifier(), examples(), given, **options).train()
    assert given.posterior.likelihood == lp.Categorical()
