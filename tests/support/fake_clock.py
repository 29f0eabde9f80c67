"""A clock that says what time it is made to be."""


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
