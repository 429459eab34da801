"""scikit-learn's own checks, and what the estimators add: the library's numbers, in scikit-learn's shapes."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import laplace_plus as lp

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.linear_model import BayesianRidge, LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from laplace_plus.errors import UnseenRowsWarning, UnsupportedError
from laplace_plus.integrations.sklearn import LaplaceClassifier, LaplaceRegressor
from laplace_plus.integrations.training import as_trained

pytestmark = pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")
IRIS = load_iris(return_X_y=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([LaplaceClassifier(epochs=50, batch_size=32), LaplaceRegressor(epochs=50, batch_size=32)])
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


def linear(n_features, n_outputs):
    return nn.Linear(n_features, n_outputs).double()


def test_probabilities_are_those_of_the_posterior():
    x, y = IRIS
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    own = LaplaceClassifier(linear, epochs=30, lr=0.1, random_state=0).fit(x, names)
    assert list(own.classes_) == sorted(set(names)) and own.n_features_in_ == 4
    batches = [(torch.as_tensor(x[i : i + 64]), torch.as_tensor(y[i : i + 64])) for i in range(0, 150, 64)]
    posterior = lp.KFAC(own.module_, "classification").fit(batches).fit_prior_precision()
    expected = posterior.predictive(torch.as_tensor(x)).mean.numpy()
    np.testing.assert_allclose(own.predict_proba(x), expected, rtol=1e-12)
    assert (own.predict(x) == names[[0] * 50 + [50] * 50 + [100] * 50]).mean() > 0.8
    again = pickle.loads(pickle.dumps(own))
    np.testing.assert_array_equal(again.predict_proba(x), own.predict_proba(x))


def test_a_linear_regressor_is_bayesian_linear_regression():
    x, y = make_regression(80, 3, noise=20.0, random_state=0)
    training = {"epochs": 300, "lr": 0.1, "weight_decay": 0.0, "batch_size": 80}
    own = LaplaceRegressor(linear, posterior="Full", random_state=0, **training).fit(x, y)
    mean, std = own.predict(x, return_std=True)
    precision, noise = float(own.posterior_.prior_precision), float(own.posterior_.noise_std)
    rows = np.column_stack([x, np.ones(80)])
    covariance = np.linalg.inv(rows.T @ rows / noise**2 + precision * np.eye(4)) * own.posterior_.covariance_scale
    expected = np.sqrt(np.einsum("ni,ij,nj->n", rows, covariance, rows) + noise**2) * y.std()
    np.testing.assert_allclose(std, expected, rtol=1e-6)
    np.testing.assert_allclose(mean, LinearRegression().fit(x, y).predict(x), atol=1e-3 * y.std())
    peer = BayesianRidge().fit(x, y).predict(x, return_std=True)[1]
    np.testing.assert_allclose(std, peer, rtol=0.05)


def test_several_targets_keep_their_shape_and_units():
    x, y = make_regression(60, 3, n_targets=2, noise=1.0, random_state=0)
    y = y * [1.0, 1000.0]
    own = LaplaceRegressor(linear, posterior="Full", epochs=100, lr=0.1, random_state=0).fit(x, y)
    mean, std = own.predict(x, return_std=True)
    assert mean.shape == std.shape == (60, 2)
    assert own.score(x, y) > 0.99
    assert 100 < std[:, 1].mean() / std[:, 0].mean() < 10_000


RIEMANNIAN = {"posterior": "Riemannian", "posterior_options": {"n_samples": 3}}


@pytest.mark.parametrize("options", [{}, pytest.param(RIEMANNIAN, marks=pytest.mark.slow)])
def test_predictions_have_the_units_of_the_targets(options):
    x, y = make_regression(40, 2, n_targets=2, noise=5.0, random_state=0)
    y = y * [1.0, 100.0] + [0.0, 1e6]
    own = LaplaceRegressor(lambda d, m: nn.Linear(d, m), epochs=50, lr=0.1, random_state=0, **options).fit(x, y)
    found, scaled = own.predictive(x), own.posterior_.predictive(torch.as_tensor(x, dtype=torch.float32))
    center, scale = torch.as_tensor(y.mean(0)), torch.as_tensor(y.std(0))
    assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=0.0, check_dtype=False)
    assert_close(found.epistemic, scaled.epistemic * scale**2)
    assert_close(found.variance, scaled.variance * scale**2)
    assert_close(found.mean - center, scaled.mean * scale, atol=1e-3)  # of 1e6 in double precision
    if found.functional_covariance is not None:
        assert_close(found.functional_covariance, scaled.functional_covariance * scale[:, None] * scale, atol=1e-6)
        low, high = found.interval(0.9)
        assert ((low.numpy() <= y) & (y <= high.numpy())).mean() > 0.7


def test_pipelines_searches_and_clones():
    x, y = IRIS
    pipeline = make_pipeline(StandardScaler(), LaplaceClassifier(epochs=10, random_state=0))
    assert (cross_val_score(pipeline, x, y, cv=2, scoring="neg_log_loss") > -0.5).all()
    search = GridSearchCV(pipeline, {"laplaceclassifier__posterior": ["Diagonal", lp.Full]}, cv=2).fit(x, y)
    assert type(search.best_estimator_[-1].posterior_) in (lp.Diagonal, lp.Full)
    module = nn.Sequential(nn.Linear(4, 3))
    before = [p.clone() for p in module.parameters()]
    copied = clone(LaplaceClassifier(module, epochs=2, posterior_options={"parameters": "last_layer"}))
    assert copied.get_params()["epochs"] == 2 and copied.module is not module
    LaplaceClassifier(module, epochs=2).fit(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_trained_module_is_taken_as_it_is():
    x, y = IRIS
    trained = LaplaceClassifier(epochs=20, random_state=0).fit(x, y).module_
    before = [p.clone() for p in trained.parameters()]
    own = LaplaceClassifier(trained, prefit=True).fit(x, y)
    assert own.module_ is trained and all(map(torch.equal, before, trained.parameters()))
    with pytest.warns(UnseenRowsWarning, match="deviation of the targets"):
        values = LaplaceRegressor(nn.Linear(4, 1).double(), prefit=True).fit(x, x[:, 0])
    with torch.no_grad():
        expected = values.module_(torch.as_tensor(x))[:, 0].numpy()
    np.testing.assert_allclose(values.predict(x), expected)  # in the network's own units


def test_skorch_nets_train_with_their_own_settings():
    skorch = pytest.importorskip("skorch", reason="needs skorch, of the extra `integrations`")
    x, y = IRIS
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    options = {"criterion": nn.CrossEntropyLoss, "lr": 0.5, "verbose": 0, "train_split": None}
    weight = {"criterion__weight": torch.tensor([1.0, 2.0, 1.0]), "criterion__label_smoothing": 0.1}
    net = skorch.NeuralNetClassifier(nn.Linear(4, 3), max_epochs=5, **options, **weight)
    own = LaplaceClassifier(net, random_state=0).fit(x, y)
    assert not hasattr(net, "module_") and own.score(x, y) > 0.7  # a copy was trained
    assert own.posterior_.likelihood == lp.Categorical(weight=(1.0, 2.0, 1.0), label_smoothing=0.1)
    torch.manual_seed(0)
    fitted = net.fit(x, y)
    same = LaplaceClassifier(fitted, prefit=True).fit(x, y)
    assert same.module_ is fitted.module_
    with pytest.raises(UnsupportedError, match="an output for each"):
        LaplaceClassifier(skorch.NeuralNetBinaryClassifier(nn.Linear(4, 1))).fit(x, y > 0)
    values = skorch.NeuralNetRegressor(nn.Linear(4, 1), max_epochs=20, lr=0.1, verbose=0, train_split=None)
    assert LaplaceRegressor(values, random_state=0).fit(x, 100 * x[:, 0]).score(x, 100 * x[:, 0]) > 0.9


def test_options_of_losses_are_taken_over_or_named():
    rare = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([5.0]))
    assert as_trained("binary", [nn.Linear(1, 1), rare]) == lp.Bernoulli(pos_weight=5.0)
    with pytest.warns(UserWarning, match="weight= of BCEWithLogitsLoss"):
        as_trained("binary", [nn.BCEWithLogitsLoss(torch.ones(1))])
    assert as_trained("classification", [nn.NLLLoss(torch.ones(2))]) == lp.Categorical(weight=(1.0, 1.0))
    plain, smooth = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)
    given = lp.Categorical(label_smoothing=0.1)
    assert as_trained(given, [smooth, plain]) is given
    for likelihood, losses in (("classification", [smooth, plain]), (lp.Bernoulli(), [rare]), ("regression", [smooth])):
        with pytest.warns(UserWarning, match="The loss of training was that of "):
            assert as_trained(likelihood, losses) is likelihood
    with pytest.warns(UserWarning, match=r"The loss of training, HuberLoss\(\), is not that of .* Gaussian"):
        as_trained("regression", [nn.HuberLoss()])


def test_sample_weights_are_repeated_rows():
    x, y = IRIS[0][::3], IRIS[1][::3]
    w = np.random.default_rng(0).integers(0, 3, len(y))
    index = np.repeat(np.arange(len(y)), w)
    options = {"posterior": "Full", "epochs": 20, "lr": 0.1, "batch_size": 200, "random_state": 0}
    for make, targets in ((LaplaceClassifier, y), (LaplaceRegressor, x @ [[1.0, 0.5], [0, 1], [2, 0], [1, 1]])):
        own = make(linear, **options).fit(x, targets, sample_weight=w)
        other = make(linear, **options).fit(x[index], targets[index])
        for a, b in zip(own.module_.parameters(), other.module_.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for posterior in (own.posterior_, other.posterior_):
            posterior.fit_prior_precision("marginal_likelihood")
        torch.testing.assert_close(own.posterior_.prior_precision, other.posterior_.prior_precision, rtol=1e-3, atol=0)
        torch.testing.assert_close(own.predictive(x).variance, other.predictive(x).variance, rtol=1e-3, atol=0)
    assert own.score(x, targets, sample_weight=w) > 0.5
    with pytest.raises(ValueError, match="non-zero"):
        LaplaceClassifier(epochs=1).fit(x, y, sample_weight=0 * w)
