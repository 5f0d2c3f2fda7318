"""decoupled-diloco: the loop of the README; the run's settings are those of the shipped recipes."""

from pathlib import Path

from common import Task, Training

import decoupled_diloco as dd


def main() -> None:
    task = Task.read()
    training = Training(task)
    token = (Path(task.folder) / "token").read_text()
    learner = dd.Learner(
        training.model,
        f"http://{task.centre}:7070",
        token=token,
        learner_id=f"learner-{task.worker}",
        optimizer=training.optimizer,
    )
    training.go_to(learner.global_step)
    training.wait_for_others()
    going_on = True
    while going_on:
        going_on = learner.step(tokens=training.step())
        training.ended()
    learner.close()
    training.finish(global_step=learner.global_step)


if __name__ == "__main__":
    main()
