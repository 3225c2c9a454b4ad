"""TLS of the gRPC port: gRPC asks for the certificate that is in force at each handshake.

Python's gRPC either requires a client certificate or asks for none, and has no setting for the version of TLS: between
our own sides it is 1.3, as `tests/node/test_tls.py` sees.
"""

import grpc

from kvstore.certificates import Pems
from node.tls import Certificates


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    given = certificates.pems

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """None: as at the last handshake."""
        nonlocal given
        if certificates.pems is given:
            return None
        given = certificates.pems
        return _configuration(given)

    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, bool(given.roots))


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.roots or None)
