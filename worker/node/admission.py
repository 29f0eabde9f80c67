"""How a process comes into a run: what it asks before it is a peer, and what it is let in by.

Where nobody answers it asks again, and tells the user whom it tries and why they do not answer. The
files are in the worker's folder, for its user alone (`murmuration.worker.identity`).
"""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import caller_host, check_name, join_address
from murmuration.protos.documents import first_difference
from murmuration.protos.figures import duration, shown
from murmuration.protos.reach import CHECK_ADDRESS, GIVE_TOKEN, cannot_listen, listening_problem
from murmuration.worker import config as configs, errors, wire
from murmuration.worker.background import LoopThread
from murmuration.worker.config import RUN_WIDE, Config
from murmuration.worker.folder import NOTHING, Remembered
from murmuration.worker.identity import certificates
from murmuration.worker.identity.authority import TRIAL, Authority
from murmuration.worker.identity.certificates import Identity, IdentityError, Role
from murmuration.worker.identity.tokens import Token
from murmuration.worker.manifest import PROTOCOL, Manifest, check_local
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.tasks import TaskError, least_bytes
from murmuration.worker.transport import AddressInUse, Method, TransportError, Untrusted
from murmuration.worker.transport.grpc import GrpcTransport

T = TypeVar("T")

FIRST_S = 120.0  # that a peer tries for which has never been a member
_TRY_S, _GLANCE_S = 3.0, 2.0
_PAUSE_S, _EAGER_S, _LATER_S = 0.25, 10.0, 2.0
_TELL_S, _TELL_AGAIN_S = 2.0, 30.0
_SKEW_S = 60.0
_CLOSE_S = 5.0
_BEGIN = "begin another by `murmur up`"  # the library says: without join=
_TURNED_AWAY = 3  # times in a row: it is there, and is no peer of this run


@dataclass(frozen=True)
class FirstAnswer:
    """The first answer of a peer or a coordinator: the run, before anything is known."""

    address: str
    manifest: Manifest
    coordinated: bool
    seen_from: str  # the host that it has seen this process at
    ahead_s: float | None  # by how much the clock here is ahead
    over: str = ""  # why nobody can join any more

    def peers(self, contacts: Sequence[str]) -> tuple[str, ...]:
        return tuple(each for each in contacts if not (self.coordinated and each == self.address))


class Newcomer(AbstractContextManager["Newcomer"]):
    """A client for what is asked, used as a context manager. any thread. Args: contacts: HOST:PORT
    of peers or a coordinator; proxy: of HTTP CONNECT, to reach them by; wait_s: how long to try;
    None: two minutes, or without end for a peer that was a member and has not seen the run's end;
    remembered: the members that it knew then; tell: takes a line for the user."""

    def __init__(
        self,
        contacts: Sequence[str] = (),
        *,
        proxy: str | None = None,
        wait_s: float | None = None,
        remembered: Remembered = NOTHING,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.contacts, self._proxy, self._tell = tuple(contacts), proxy, tell
        self._known, self.remembered = remembered, remembered.members
        default_s = math.inf if self.remembered and not remembered.over else FIRST_S
        self._wait_s = default_s if wait_s is None else wait_s
        self._thread: LoopThread | None = None
        self._transport: GrpcTransport | None = None
        self._problems: dict[str, str] = {}  # by address: why it has not answered
        self._turned_away: dict[str, int] = {}  # how often in a row
        self._first: FirstAnswer | None = None  # whose run it is
        self._name = ""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Tells the peer whose run is another than this process wants: it is refused there too."""
        if isinstance(error, errors.ManifestRefused) and self._first is not None:
            address = self._first.address
            manifest = Manifest({**self._first.manifest.document, **error.own})
            asked = pb.JoinRequest(member=pb.Member(peer=self._name), manifest=manifest.pack())
            raw = asked.SerializeToString()
            with suppress(TransportError):
                self._do(lambda: self._client.call(address, Method.JOIN, raw, _GLANCE_S), None)
        if self._thread is not None:
            if self._transport is not None:
                with suppress(TimeoutError):
                    self._thread.do(self._transport.close, _CLOSE_S)
            self._thread.close()

    def enrol(self, token: Token, name: str, folder: Path | None = None) -> Identity:
        """Asks the contacts for a certificate of the key in the folder, until one gives it. Raises
        PeersUnreachable; IdentityError: they refuse, are of another run, or the token has expired;
        OSError: the folder cannot be written, and the token is not spent."""
        token.check_date()
        key, refused = certificates.kept_key(folder), Counter[str]()
        request = certificates.request_for(key)
        asked = pb.EnrolRequest(name=name, request=request).SerializeToString()
        given = f"{TRIAL}{token.id}" if name.startswith(TRIAL) else name

        async def ask() -> Identity | None:
            """Asks one after the other: a token lets in as often as it says."""
            for address in [each for each in self.contacts if refused[each] < _TURNED_AWAY]:
                try:
                    raw = await self._client.call(address, Method.ENROL, asked, _TRY_S)
                    reply = wire.parse(pb.EnrolReply, raw)
                except (TransportError, wire.WireError) as error:
                    self._problems[address] = str(error)
                    if isinstance(error, Untrusted):  # one that only closes may be about to start
                        refused[address] += 1 if error.closed else _TURNED_AWAY
                    continue
                if reply.refusal:
                    self._problems[address] = f"{address} refuses: {shown(reply.refusal, 200)}"
                    refused[address] = _TURNED_AWAY
                    continue
                pem = certificates.key_to_pem(key)
                own = Identity.of(pem, reply.certificate, token.identity.authority)
                if (own.role, own.name) != (Role.PEER, given):
                    raise IdentityError(f"{address} gives the certificate of {shown(own.name)}")
                return own
            if any(refused[each] < _TURNED_AWAY for each in self.contacts):
                return None
            why = "; ".join(self._problems.values())
            raise IdentityError(f"not let in by token {token.id}: {why}")

        return self._do(lambda: self._until_answered(ask), token.identity)

    def ask_run(self, identity: Identity | None) -> FirstAnswer:
        """Asks what the run is; of all that answer, the first that is named. Raises
        PeersUnreachable, at once where a coordinator says that the run is over; IdentityError:
        there is no certificate, or it is of another run."""
        looks = identity is None and self._proxy is None

        async def first() -> FirstAnswer | None:
            for answer in await self._glances(looks, _TRY_S):
                if answer.address in self.contacts or answer.manifest.run == self._known.run:
                    if answer.over:
                        raise errors.PeersUnreachable(f"{answer.address}: {answer.over}; {_BEGIN}")
                    self._first = answer
                    return answer
                self._problems[answer.address] = f"{answer.address}: another run by now"
            return None

        return self._do(lambda: self._until_answered(first), identity)

    def check_run(self, config: Config, identity: Identity | None) -> str:
        """Asks those that answer at once whether they run what `config` says. Returns the host that
        the first of the contacts has seen this process at. Raises ManifestRefused, with the
        difference; IdentityError: one is of an encrypted run, and there is no certificate."""
        if not self.contacts:
            return ""
        looks = identity is None and self._proxy is None
        named = self._do(lambda: self._glances(looks), identity)
        answers = [each for each in named if each.address in self.contacts]
        mine = Manifest.of(config, ()).agreed
        for answer in answers:
            self._first = answer
            check_version(answer)
            theirs = {**answer.manifest.agreed, "tensors": mine["tensors"]}  # known with the model
            if difference := first_difference(mine, theirs):
                raise errors.ManifestRefused(
                    f"{answer.address} runs something else: {difference}; leave out the setting or "
                    "the preset that says so, or join another run",
                    {**mine, "tensors": answer.manifest.agreed.get("tensors")},
                )
        return next((a.seen_from for a in answers if a.address == self.contacts[0]), "")

    def stage_to_serve(self, address: str, stages: StagesConfig, identity: Identity | None) -> int:
        """Raises PeersUnreachable."""
        from murmuration.worker.pipeline.rebalancing import members_at, stage_in_need

        try:
            members = self._do(lambda: members_at(self._client, address), identity)
            return stage_in_need(members, stages)
        except (TransportError, wire.WireError) as error:
            raise errors.PeersUnreachable(
                f"{address} does not say who serves which stage: {error}; choose one with --stage"
            ) from error

    @property
    def _client(self) -> GrpcTransport:
        assert self._transport is not None, "asked on the loop, by `_do`"
        return self._transport

    def _do(self, work: Callable[[], Awaitable[T]], proves: Identity | None) -> T:

        async def asked() -> T:
            self._name = proves.name if proves is not None else self._name
            if self._transport is None:
                self._transport = GrpcTransport("127.0.0.1:0", self._proxy, proves)
            elif proves is not None:
                self._transport.renew(proves)
            return await work()

        if self._thread is None:
            self._thread = LoopThread("murmur-newcomer", lambda event: None)
            self._thread.start()
        return self._thread.do(asked)

    async def _until_answered(self, sweep: Callable[[], Awaitable[T | None]]) -> T:
        """Raises PeersUnreachable, and as `sweep`."""
        began = time.monotonic()
        tell_at, tries = began + _TELL_S, 0
        while True:
            tries += 1
            if (found := await sweep()) is not None:
                return found
            now = time.monotonic()
            over = "this peer's run is over: " if self._known.over else "if the run is over, "
            why = "; ".join((*self._problems.values(), CHECK_ADDRESS, f"{over}{_BEGIN}"))
            left_s = began + self._wait_s - now
            if left_s <= 0:
                raise errors.PeersUnreachable(
                    f"nobody answers: {why} ({tries} tries in {now - began:.1f} s)"
                )
            if now >= tell_at:
                tell_at = now + _TELL_AGAIN_S
                until = "until one does" if left_s == math.inf else f"for {duration(left_s)} more"
                self._tell(f"nobody answers yet: {why}; trying {until}")
            pause_s = _PAUSE_S if now < began + _EAGER_S else _LATER_S
            await asyncio.sleep(min(pause_s, left_s))

    async def _glances(self, looks: bool, timeout_s: float = _GLANCE_S) -> list[FirstAnswer]:
        """The answers to one call of each. Raises IdentityError: only another run answers."""
        addresses = (*dict.fromkeys((*self.contacts, *self.remembered)),)
        asked = (self._glance(address, looks, timeout_s) for address in addresses)
        found = await asyncio.gather(*asked, return_exceptions=True)
        self._problems = {a: self._problems[a] for a in addresses if a in self._problems}
        answers = [each for each in found if isinstance(each, FirstAnswer)]
        for address, each in zip(addresses, found, strict=True):
            strange = isinstance(each, IdentityError) and not answers and address in self.contacts
            if isinstance(each, BaseException) and (
                strange or not isinstance(each, errors.MurmurError)
            ):
                raise each
        return answers

    async def _glance(self, address: str, looks: bool, timeout_s: float) -> FirstAnswer | None:
        request = pb.JoinRequest().SerializeToString()
        times = self._turned_away.pop(address, 0)
        try:
            raw = await self._client.call(address, Method.JOIN, request, timeout_s)
            reply = wire.parse(pb.JoinReply, raw)
            manifest = Manifest.unpack(reply.manifest)
        except (TransportError, wire.WireError) as error:
            self._problems[address] = str(error)
            if not isinstance(error, Untrusted):
                return None
            if looks and await asyncio.to_thread(certificates.is_encrypted_run, address):
                raise IdentityError(f"{address}: {GIVE_TOKEN}") from error
            self._turned_away[address] = times + 1
            if times + 1 >= _TURNED_AWAY and not error.closed:
                raise IdentityError(f"not let in: {error}") from error
            return None
        ahead_s = time.time() - reply.time_ms / 1000 if reply.time_ms else None
        seen_from = caller_host(f"ipv4:{join_address(reply.seen_from, 0)}")  # if it is a host
        over = shown(reply.refusal, 200)
        return FirstAnswer(address, manifest, reply.coordinator, seen_from, ahead_s, over)


def check_version(answer: FirstAnswer) -> None:
    """Raises ManifestRefused."""
    if (theirs := answer.manifest.document["protocol"]) != PROTOCOL:
        raise errors.ManifestRefused(
            f"{answer.address} speaks protocol {theirs}, and this version speaks {PROTOCOL}; "
            "install the version that they run",
            {"protocol": PROTOCOL},
        )


def clock_warning(answer: FirstAnswer) -> str | None:
    if answer.ahead_s is None or abs(answer.ahead_s) <= _SKEW_S:
        return None
    side = "ahead of" if answer.ahead_s > 0 else "behind"
    return (
        f"the clock here is {abs(answer.ahead_s):.0f} s {side} that of {answer.address}; set it, "
        "by NTP: training goes on, but certificates and tokens may not be taken, and logs do not "
        "fit"
    )


def join_config(
    run: Mapping[str, Any],
    path: Path | None,
    settings: Iterable[str],
    where: str,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """Makes the config of a machine that joins a run. Args: run: the run-wide sections, from the
    run's manifest; `where` it came from; path, settings, flags: this machine's own; what they say
    of the run must agree with it. Raises ManifestRefused: the first key in which they do not;
    ConfigError: as `load_config`; TaskError: it would have this machine load code or read a file
    that the user has not named, or build a model that is larger than its memory."""
    document, source = configs.read_all(path, settings, flags or {})
    own = configs.parse_config(document, source)  # names and types first
    for section in RUN_WIDE:
        if not isinstance(run.get(section, {}), Mapping):
            raise errors.ManifestRefused(f"{where} has a manifest without a section [{section}]")
    chosen = {name: dict(run[name]) for name in RUN_WIDE if name in run}
    for section, key in configs.LOCAL:
        chosen.get(section, {}).pop(key, None)
    for section in RUN_WIDE:
        for key in sorted(document.get(section, {})):
            if (section, key) in (*configs.ADVISED, *configs.LOCAL):
                chosen.setdefault(section, {})[key] = document[section][key]
                continue
            ours, theirs = configs.to_document(own)[section].get(key), run.get(section, {}).get(key)
            if ours != theirs:
                raise errors.ManifestRefused(
                    f"{where} runs something else: {section}.{key}: {ours} here, {theirs} there; "
                    "leave out the setting or the preset that says so, or join another run",
                    {section: {**run.get(section, {}), key: ours}},
                )
    machine = {name: part for name, part in document.items() if name not in RUN_WIDE}
    try:
        config = configs.parse_config({**chosen, **machine}, f"the run at {where}")
        check_local(config, document, f"the run at {where}")
        needed = least_bytes(config.task.name, config.task.options, config.stages.count)
        if (held := _machine_bytes()) and needed > held:
            raise TaskError(
                f"the run at {where}: training its model takes {needed / 1e9:.3g} GB of memory at "
                f"least, and this machine has {held / 1e9:.3g} GB: join another run, or from a "
                "larger machine"
            )
        return config
    except errors.ConfigError as error:
        codecs = (chosen.get("diloco", {}).get(key) for key in ("codec", "reduction_codec"))
        unknown = [name for name in codecs if name not in configs.CODEC_NAMES]
        if not unknown:
            raise
        raise errors.ManifestRefused(
            f"{where} exchanges in the codec {unknown[0]!r}, which this version does not know (it "
            f"knows {', '.join(configs.CODEC_NAMES)}); install the version that they run"
        ) from error


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The means by which a worker is let in."""

    folder: Path | None  # the worker's own; None keeps the certificate in memory
    default_name: str
    name: str | None = None  # as typed
    token: Token | None = None
    insecure: bool = False
    public: bool = False  # whether other machines can reach the peer
    listen: str | None = None  # a token is not spent where that is taken
    trial: bool = False  # the token is tried, and not used up

    def identity(self, newcomer: Newcomer) -> Identity | None:
        """Returns the peer's key and certificate; None: nothing is encrypted, as asked, or since
        only this machine can reach the peer. Args: newcomer: without contacts the run begins here.

        Raises IdentityError: it is not let in; PeersUnreachable; ConfigError: other machines can
        reach it, and it has no token; UsageError: a token for nothing; AddressInUse."""
        if self.name is not None:
            check_name(self.name, IdentityError)
        if self.insecure:
            if self.token is not None:
                raise errors.UsageError("--insecure and a token: one or the other")
            return None
        if self.folder is not None and (held := Identity.load(self.folder)) is not None:
            if self.name not in (None, held.name) or held.role is not Role.PEER:
                raise errors.ConfigError(
                    f"{self.folder} has the certificate of {held.role} {held.name}, not of peer "
                    f"{self.name or self.default_name}: leave --name out, or choose another --out"
                )
            if self.token is not None and self.token.identity.authority != held.authority:
                raise IdentityError(
                    f"{self.folder} has a certificate of another run than the token: choose "
                    "another --out, or leave the token out"
                )
            return held
        name, contacts = self.name or self.default_name, newcomer.contacts
        folder = None if self.trial else self.folder
        try:
            if self.token is not None:
                if not contacts:
                    raise errors.UsageError("a token is for joining a run: say whom to join")
                check_free(self.listen)
                wanted = f"{TRIAL}{name}" if self.trial else name
                identity = newcomer.enrol(self.token, wanted, folder)
            elif (authority := self._authority(contacts)) is not None:
                identity = authority.new_identity(Role.PEER, name)
            else:
                return None
            if folder is not None:
                identity.save(folder)
        except OSError as error:
            raise errors.ConfigError(f"{self.folder}: {error}; choose another folder") from error
        return identity

    def _authority(self, contacts: Sequence[str]) -> Authority | None:
        """The run's, made where it begins; None: no encryption. Raises ConfigError, OSError."""
        held = Authority.load(self.folder) if self.folder is not None else None
        if held is not None or not self.public:
            return held
        if contacts or self.folder is None:
            wanted = "its run has a key: name a folder to keep it in with --out"
            if contacts:
                wanted = (
                    "it needs a token: make one where the run was begun, with `murmur token create "
                    "RUN`, which is its --out, and give it as --token"
                )
            raise errors.ConfigError(
                f"other machines can reach this peer, so {wanted} (or say --insecure: nothing is "
                "encrypted then, and anybody may join)"
            )
        return Authority.make(self.folder)


def check_free(listen: str | None) -> None:
    """Raises AddressInUse."""
    if listen and (problem := listening_problem(listen)) is not None:
        raise AddressInUse(cannot_listen("--listen", listen, problem))
