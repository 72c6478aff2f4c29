#!/bin/sh
find birds -type f -empty -exec rm {} +
