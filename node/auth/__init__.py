"""Authenticate and authorize: identities from a file, one rule per request, one authorizer.

In: a token or the name of a certificate, the request's name and the namespace that it is about.
Out: nothing, or an error. What was refused and what an administrator did is written down (`audit`).
"""
