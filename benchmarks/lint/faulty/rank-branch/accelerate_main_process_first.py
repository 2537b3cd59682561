"""The main process waits for all inside `main_process_first`, where the others wait for it."""


def load(accelerator):
    with accelerator.main_process_first():
        data = prepare()
        accelerator.wait_for_everyone()  # expect: rank-branch
