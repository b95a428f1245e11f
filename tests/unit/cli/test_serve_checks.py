"""What can be known to be wrong before anything starts is said before anything starts."""

from __future__ import annotations

import socket

import pytest

from cli.checks import check_port, check_transport
from core.config import RouterConfig, TransferConfig
from core.errors import ConfigError


def test_a_transport_that_cannot_leave_a_process_is_refused() -> None:
    with pytest.raises(ConfigError, match='"memory" joins workers of one process only'):
        check_transport(TransferConfig(transport="memory"))
    check_transport(TransferConfig(transport="nixl"))


def test_a_taken_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .* --port"):
            check_port(RouterConfig(port=port))
    check_port(RouterConfig(port=0))
