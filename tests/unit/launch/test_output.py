"""What processes print comes through one thread, which can be waited for."""

import os
import threading

from unisono.launch.streams import Output


def test_what_was_printed_before_is_there_after_catching_up():
    output = Output()
    streams = output.open(1)
    expected = ""
    for i in range(200):
        line = f"{i} " * 1000 + "\n"
        os.write(streams.stdout, line.encode())
        assert output.catch_up(10)
        expected += line
        assert output.last_output(1).endswith(expected[-4000:])
    streams.close()
    output.close()


def test_a_reader_that_takes_no_more_text_is_not_waited_for():
    taken = threading.Event()
    output = Output(is_all_shown=True, show=lambda number, data: taken.wait())
    streams = output.open(1)
    os.write(streams.stdout, b"a line\n")
    assert not output.catch_up(0.2)
    taken.set()
    assert output.catch_up(10)
    streams.close()
    output.close()
