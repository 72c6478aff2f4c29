#!/bin/sh
if [ -e final.txt ] && [ ! -e draft.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
