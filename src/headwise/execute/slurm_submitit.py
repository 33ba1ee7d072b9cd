"""Arrays through submitit, for clusters whose users have it set up. It submits and nothing more:
what becomes of a job is seen in the queue and in the store (slurm.py)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.execute.base import Job
from headwise.execute.slurm import NAME, THREADS, command_of, flags_of, reason_of, refusal, setup_of

# submitit pickles a command for each job. Nothing in a store is executed, so they are not there.
FOLDER = "~/.cache/headwise/submitit/%j"
# submitit's own signal (USR2) would end a worker unsaved. This one comes to the job's processes so
# many seconds before its time is up.
SIGNAL = "TERM@30"


def submit_by_submitit(jobs: Sequence[Job], options: Mapping[str, str], most: int) -> list[str]:
    """One array by submitit; returns an id for each job."""
    import submitit

    executor = submitit.SlurmExecutor(folder=Path(FOLDER).expanduser())
    given: dict[str, Any] = {key: value or True for key, value in options.items()}
    executor.update_parameters(
        job_name=NAME,
        time=None,  # the partition's, not submitit's five minutes
        wckey=None,
        array_parallelism=most,
        # The shell outlives SIGTERM, since with it all of the job would end.
        setup=[*setup_of().splitlines(), THREADS, "trap : TERM"],
        use_srun=False,
        additional_parameters={"signal": SIGNAL, "requeue": True, **given},
    )
    try:
        # It prints what sbatch complains of, which the error says too.
        with contextlib.redirect_stderr(io.StringIO()), executor.batch():
            made = [
                executor.submit(submitit.helpers.CommandFunction(["sh", "-c", command_of(job)]))
                for job in jobs
            ]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as e:
        raise refusal(flags_of(options), RuntimeError(reason_of(str(e)))) from None
    return [job.job_id for job in made]
