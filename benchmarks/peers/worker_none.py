"""No communication at all: what the others are compared with."""

from common import Task, Training


def main() -> None:
    training = Training(Task.read())
    training.wait_for_others()
    for _ in range(training.task.steps):
        training.step()
        training.ended()
    training.finish()


if __name__ == "__main__":
    main()
