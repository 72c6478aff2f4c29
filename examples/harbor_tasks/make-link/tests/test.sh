#!/bin/sh
if [ "$(readlink current)" = birds ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
