from uuid import uuid4

import pytest
import torch
from safetensors.torch import load, save

from decoupled_diloco.errors import ConfigError, MergeError
from decoupled_diloco.merge import DelayedNesterov, NesterovSGD, TorchOuter, make_outer
from decoupled_diloco.merge.outer import AVERAGE, Averaged, register_own_outer

WORKING = ["nesterov", "sgd", "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor"]
MANY = 2**17 + 5  # more than one block


def gradients(count, numel=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("name", WORKING)
def test_state_goes_through_safetensors(name):
    make = make_outer(name, lr=0.1)
    original, restored = make(6), make(6)
    master = torch.ones(6)
    for gradient in gradients(3):
        original.step(master, gradient)
    restored.load_state_dict(load(save(original.state_dict())))
    ours, theirs = master.clone(), master.clone()
    for gradient in gradients(2):
        original.step(ours, gradient)
        restored.step(theirs, gradient)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", WORKING)
def test_steps_in_place_and_leaves_the_gradient_alone(name):
    master, gradient = torch.ones(6), torch.full((6,), 0.5)
    address = master.data_ptr()
    make_outer(name, lr=0.1)(6).step(master, gradient)
    assert master.data_ptr() == address
    assert not master.requires_grad
    assert bool((master < 1).all())
    assert torch.equal(gradient, torch.full((6,), 0.5))


def average_of(versions, decay):
    """Return the average of all versions as a weighted sum, in fp64."""
    weights = []
    for k in range(1, len(versions) + 1):
        share = max(1 - decay, 1 / k)
        weights = [(1 - share) * weight for weight in weights] + [share]
    assert sum(weights) == pytest.approx(1)
    return sum(w * v.double() for w, v in zip(weights, versions, strict=True))


@pytest.mark.parametrize("decay", [0.3, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("name", ["nesterov", "sgd", "AdamW"])
def test_the_average_is_that_of_all_versions(name, decay):
    """A process that continues from the saved state after each step has the same bits."""
    make, numel = make_outer(name, lr=0.1), MANY
    original, plain = Averaged(make(numel), decay), make(numel)
    ours, alone, versions = torch.ones(numel), torch.ones(numel), []
    assert AVERAGE not in original.state_dict()
    for gradient in gradients(12, numel):
        restored, theirs = Averaged(make(numel), decay), ours.clone()
        restored.load_state_dict(load(save(original.state_dict())))
        original.step(ours, gradient)
        restored.step(theirs, gradient)
        plain.step(alone, gradient)
        versions.append(ours.clone())
        assert torch.equal(original.state_dict()[AVERAGE], restored.state_dict()[AVERAGE])
        expected = average_of(versions, decay).float()
        torch.testing.assert_close(original.state_dict()[AVERAGE], expected)
    assert torch.equal(ours, alone), "the average changes no step"


def test_the_first_versions_count_alike():
    average, master = Averaged(make_outer("sgd", lr=1.0)(6), 0.8), torch.full((6,), 100.0)
    for _ in range(5):
        average.step(master, torch.ones(6))
    torch.testing.assert_close(average.state_dict()[AVERAGE], torch.full((6,), 97.0))


def test_a_loaded_average_is_a_copy():
    original, restored = (Averaged(make_outer("sgd", lr=1.0)(6), 0.5) for _ in range(2))
    original.step(torch.ones(6), torch.ones(6))
    restored.load_state_dict(original.state_dict())
    original.step(torch.ones(6), torch.ones(6))
    restored.step(torch.full((6,), 9.0), torch.ones(6))
    torch.testing.assert_close(original.state_dict()[AVERAGE], torch.zeros(6))


@pytest.mark.parametrize("name", WORKING)
def test_fragments_are_independent(name):
    make = make_outer(name, lr=0.1)
    busy, fresh, alone = make(6), make(6), make(6)
    for gradient in gradients(3):
        busy.step(torch.ones(6), gradient)
    ours, theirs = torch.ones(6), torch.ones(6)
    fresh.step(ours, torch.ones(6))
    alone.step(theirs, torch.ones(6))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", WORKING)
def test_sizes_must_match(name):
    optimizer = make_outer(name, lr=0.1)(6)
    with pytest.raises(MergeError, match="must be equal"):
        optimizer.step(torch.ones(6), torch.ones(5))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.5, False), (0.0, False)])
def test_nesterov_equals_torch(momentum, nesterov):
    ours, theirs = torch.ones(MANY), torch.ones(MANY)
    optimizer = NesterovSGD(0.7, momentum, nesterov)
    reference = TorchOuter("SGD", MANY, lr=0.7, momentum=momentum, nesterov=nesterov)
    for gradient in gradients(3, MANY):
        optimizer.step(ours, gradient)
        reference.step(theirs, gradient)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class TestNesterov:
    def test_without_momentum_no_state_is_kept(self):
        optimizer = NesterovSGD(1.0, 0.0)
        optimizer.step(torch.ones(3), torch.ones(3))
        assert optimizer.state_dict() == {}

    def test_state_is_allocated_at_the_first_step(self):
        optimizer = NesterovSGD()
        assert optimizer.state_dict() == {}
        optimizer.step(torch.ones(3), torch.ones(3))
        assert optimizer.state_dict()["momentum"].dtype == torch.float32

    def test_a_loaded_state_is_a_copy(self):
        momentum = torch.ones(3)
        optimizer = NesterovSGD()
        optimizer.load_state_dict({"momentum": momentum})
        optimizer.step(torch.ones(3), torch.ones(3))
        assert torch.equal(momentum, torch.ones(3))

    def test_state_of_another_size(self):
        optimizer = NesterovSGD()
        optimizer.load_state_dict({"momentum": torch.ones(4)})
        with pytest.raises(MergeError, match="must be equal"):
            optimizer.step(torch.ones(3), torch.ones(3))

    @pytest.mark.parametrize("momentum", [0.0, 0.5])
    def test_state_of_another_optimizer(self, momentum):
        with pytest.raises(MergeError, match="resume with the same optimizer"):
            NesterovSGD(1.0, momentum).load_state_dict({"exp_avg": torch.ones(3)})

    @pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
    def test_momentum_out_of_range(self, momentum):
        with pytest.raises(ConfigError, match=r"not in \[0, 1\)"):
            NesterovSGD(momentum=momentum)


class TestTorchOuter:
    def test_state_of_another_optimizer(self):
        adam = TorchOuter("Adam", 3, lr=0.1)
        adam.step(torch.ones(3), torch.ones(3))
        with pytest.raises(MergeError, match="'Adagrad' keeps"):
            TorchOuter("Adagrad", 3, lr=0.1).load_state_dict(adam.state_dict())

    def test_state_of_another_size(self):
        adam = TorchOuter("Adam", 3, lr=0.1)
        adam.step(torch.ones(3), torch.ones(3))
        with pytest.raises(MergeError, match="another partition"):
            TorchOuter("Adam", 4, lr=0.1).load_state_dict(adam.state_dict())


class TestMakeOuter:
    def test_defaults(self):
        nesterov, sgd = make_outer()(3), make_outer("sgd", lr=1.0)(3)
        assert (nesterov.lr, nesterov.momentum, nesterov.nesterov) == (0.7, 0.5, True)
        assert (sgd.lr, sgd.momentum) == (1.0, 0.0)

    def test_momentum_and_options_reach_the_torch_class(self):
        optimizer = make_outer("SGD", 0.5, 0.9, {"nesterov": True, "weight_decay": 0.1})(3)
        assert isinstance(optimizer, TorchOuter)
        ours = torch.ones(3)
        optimizer.step(ours, torch.zeros(3))
        torch.testing.assert_close(ours, torch.full((3,), 1 - 0.5 * (0.1 + 0.9 * 0.1)))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("nestrov",), "'nestrov' is unknown: did you mean 'nesterov'"),
            (("adamw",), "'adamw' is unknown: did you mean 'AdamW'"),
            (("AdamW", 0.1, 0.9), "'AdamW' does not take momentum"),
            (("AdamW", 0.1, None, {"beta": 1}), "'AdamW' does not take beta.* it takes lr, betas"),
            (("AdamW", 0.1, None, {"betas": (2, 1)}), "'AdamW' rejects"),
            (("AdamW", 0.1, None, {"lr": 0.2}), r"\['lr'\]: set lr and momentum outside"),
            (("nesterov", 0.1, 0.9, {"weight_decay": 1}), r"takes lr and momentum, not \['weight"),
            (("nesterov", 0.0), "lr=0.0 must be positive"),
            (("AdamW", float("nan")), "lr=nan must be positive"),
            (("sgd", 1.0, 1.0), "momentum=1.0"),
            (("LBFGS", 0.1), "'LBFGS' cannot step on a flat vector"),
            (("SparseAdam", 0.1), "'SparseAdam' cannot step on a flat vector"),
            (("Optimizer", 0.1), "'Optimizer' is unknown"),
        ],
    )
    def test_an_unusable_optimizer_is_rejected_before_the_run(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            make_outer(*arguments)


class TestDelayedNesterov:
    def test_with_every_one_it_equals_nesterov(self):
        delayed, plain = DelayedNesterov(0.3, 0.9, every=1), NesterovSGD(0.3, 0.9)
        ours, theirs = torch.ones(MANY), torch.ones(MANY)
        for gradient in gradients(4, MANY):
            delayed.step(ours, gradient)
            plain.step(theirs, gradient)
        torch.testing.assert_close(ours, theirs)

    def test_it_matches_the_paper(self):
        """Async Local-SGD, Algorithm 3, one number at a time."""
        lr, beta, n = 0.5, 0.9, 3
        theta, momentum, total = 1.0, 0.0, 0.0
        optimizer, master = DelayedNesterov(lr, beta, every=n), torch.ones(1)
        for step, gradient in enumerate(gradients(10, 1)):
            g = float(gradient)
            total += g
            if (step + 1) % n == 0:
                momentum = beta * momentum + total / n
                theta -= lr * (beta * momentum + g / n)
                total = 0.0
            else:
                theta -= lr * g / n
            optimizer.step(master, gradient)
            assert float(master) == pytest.approx(theta, abs=1e-6)

    @pytest.mark.parametrize("steps", [1, 2, 3, 4])
    def test_it_continues_from_any_merge(self, steps):
        make = make_outer("delayed-nesterov", 0.1, 0.5, {"every": 3})
        original, restored, master = make(6), make(6), torch.ones(6)
        for gradient in gradients(steps):
            original.step(master, gradient)
        restored.load_state_dict(load(save(original.state_dict())))
        ours, theirs = master.clone(), master.clone()
        for gradient in gradients(4):
            original.step(ours, gradient)
            restored.step(theirs, gradient)
        assert torch.equal(ours, theirs)

    def test_another_state_or_size_is_rejected(self):
        optimizer = DelayedNesterov(every=2)
        with pytest.raises(MergeError, match="resume with the same optimizer"):
            optimizer.load_state_dict({"momentum": torch.ones(6)})
        optimizer.step(torch.ones(6), torch.ones(6))
        with pytest.raises(MergeError, match="must be equal"):
            optimizer.step(torch.ones(5), torch.ones(5))

    @pytest.mark.parametrize("options", [None, {}, {"every": 3, "nesterov": True}, {"each": 3}])
    def test_it_requires_exactly_one_option(self, options):
        with pytest.raises(ConfigError, match="set only 'every'"):
            make_outer("delayed-nesterov", options=options)

    @pytest.mark.parametrize("every", [0, -1, 2.5, True, "3"])
    def test_every_is_a_number_of_merges(self, every):
        with pytest.raises(ConfigError, match="use an integer >= 1"):
            make_outer("delayed-nesterov", options={"every": every})


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["beta"])
                p.sub_(m.sign(), alpha=group["lr"])


class Averaging:
    """An optimizer without `torch.optim`: it updates the master and keeps the mean gradient."""

    def __init__(self, params, lr):
        self.lr, self.mean, self.count = lr, torch.zeros_like(params[0]).detach(), 0

    def step(self, master, gradient):
        self.count += 1
        self.mean += (gradient - self.mean) / self.count
        master.sub_(self.mean, alpha=self.lr)

    def state_dict(self):
        return {"mean": self.mean, "count": torch.tensor(self.count)} if self.count else {}

    def load_state_dict(self, state):
        if state:
            self.mean, self.count = state["mean"].clone(), int(state["count"])


class Forgetful(Averaging):
    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"].clone()


class CountsInItsGroup(Lion):
    """A behavior of schedule-free and other optimizers."""

    def step(self):
        self.param_groups[0]["lr"] *= 0.5
        super().step()


def registered(make):
    name = f"tests:{make.__name__}-{uuid4().hex}"
    register_own_outer(name, make)
    return name


class TestOwnOptimizers:
    @pytest.mark.parametrize("own", [Lion, Averaging])
    def test_it_steps_and_its_state_goes_through_safetensors(self, own):
        make = make_outer(registered(own), lr=0.1)
        original, restored = make(6), make(6)
        ours, theirs = torch.ones(6), torch.ones(6)
        for gradient in gradients(5):
            original.step(ours, gradient)
            restored.step(theirs, gradient)
            state = load(save(restored.state_dict()))
            restored = make(6)
            restored.load_state_dict(state)
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, torch.ones(6))

    def test_options_reach_it(self):
        make = make_outer(registered(Lion), lr=0.5, options={"beta": 0.0})
        master = torch.zeros(2)
        make(2).step(master, torch.tensor([3.0, -1.0]))
        assert master.tolist() == [-0.5, 0.5]
        with pytest.raises(ConfigError, match="does not take gamma: remove it; it takes lr, beta"):
            make_outer(registered(Lion), lr=0.5, options={"gamma": 1})

    @pytest.mark.parametrize("own", [Forgetful, CountsInItsGroup])
    def test_incomplete_state_is_detected_before_a_run(self, own):
        with pytest.raises(ConfigError, match="steps differently after its state was saved"):
            make_outer(registered(own), lr=0.1)

    def test_an_optimizer_that_changes_the_gradient_is_rejected(self):
        class Greedy(Averaging):
            def step(self, master, gradient):
                master.sub_(gradient.mul_(2))

        with pytest.raises(ConfigError, match="changes the gradient"):
            make_outer(registered(Greedy), lr=0.1)

    def test_an_optimizer_that_raises_in_a_step_is_rejected(self):
        class Broken(Averaging):
            def step(self, master, gradient):
                raise KeyError("exp_avg")

        with pytest.raises(ConfigError, match="cannot step on a flat vector: KeyError"):
            make_outer(registered(Broken), lr=0.1)

    def test_momentum_may_be_an_option(self):
        def sgd(params, lr, momentum):
            return torch.optim.SGD(params, lr, momentum)

        make_outer(registered(sgd), lr=0.1, options={"momentum": 0.9})
        make_outer("SGD", lr=0.1, options={"momentum": 0.9})

    def test_a_process_that_has_not_loaded_it_can_read_the_settings(self):
        make = make_outer("nobody:here", lr=0.1)
        with pytest.raises(ConfigError, match="is not loaded in this process"):
            make(3)
