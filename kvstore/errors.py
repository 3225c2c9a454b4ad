"""Define every error that a caller can meet, by what the caller can do about it.

    KVStoreError
    ├── InvalidRequest     change the request; the message names the field and the allowed range
    ├── UnknownNamespace   open the namespace, then ask again (the client does so by itself)
    ├── LayoutMismatch     these bytes belong to another layout: recompute, fix the configuration
    ├── Exhausted          a limit is reached: recompute, perhaps try again later
    ├── Unavailable        no node answers: recompute; the client reconnects by itself
    ├── DeadlineExceeded   the answer came too late: recompute
    ├── Unauthenticated    the credential is unknown: set a token or certificate that the node knows
    ├── Forbidden          the identity lacks a right: ask the operator for another role or tenant
    ├── ProtocolError      the peer speaks another version, or broke the framing
    └── ConfigError        a setting is out of range; ends the start

A miss is a value, not an error, and so is a page whose checksum does not match.
"""


class KVStoreError(Exception):
    """Base of all errors raised by this project.

    `answered`: the error was sent by a peer, so the peer is alive.
    """

    answered = False


class InvalidRequest(KVStoreError):
    """The request itself is wrong."""


class UnknownNamespace(KVStoreError):
    """The node does not know this namespace (perhaps it was restarted)."""


class LayoutMismatch(KVStoreError):
    """The layout or page size is not the registered one."""


class Exhausted(KVStoreError):
    """A limit of the node or of this process is reached."""


class Unavailable(KVStoreError):
    """The node can not be reached, is draining, or its circuit breaker is open."""


class DeadlineExceeded(KVStoreError):
    """The deadline of the call passed."""


class Unauthenticated(KVStoreError):
    """The credential is missing, or the node does not know it (any more)."""


class Forbidden(KVStoreError):
    """The identity is known, but lacks the right to do this."""


class ProtocolError(KVStoreError):
    """The peer does not speak this protocol."""


class ConfigError(KVStoreError):
    """A configuration value is unusable."""
