"""What several test files of the core share."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For recorded models that are so small that waking a second thread costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
