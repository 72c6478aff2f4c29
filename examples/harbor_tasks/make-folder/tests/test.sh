#!/bin/sh
if [ -d out ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
