"""Authenticate and authorize: identities from a file, one rule per request, one authorizer.

Input are a token or the names of a certificate, the request's name and its namespace; output is
nothing or an error. Refusals and acts of administrators are logged (`audit`).
"""
