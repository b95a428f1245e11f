"""The stubs of the public API: `make protos` generates them from protos/. All of Tandem imports these, and no others.

A program that uses the client therefore never imports the package name `protos`, which its own code may use.
"""
