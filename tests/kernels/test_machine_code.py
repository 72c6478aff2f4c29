"""The reader of machine code: loops, what they compute twice, what they wait for, what they spill."""

from __future__ import annotations

import pytest

from .aot.machine_code import Loop, ctas_per_sm, parse

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function main_kernel:
  REG:178 STACK:24 SHARED:1024 LOCAL:0 CONSTANT[0]:680 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function plain_kernel:
  REG:32 STACK:8 SHARED:0 LOCAL:4 CONSTANT[0]:540 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
.text.main_kernel:
        /*0000*/                   STL [R1], R2 ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R141+0x8000], desc[UR42][R88.64], P1 ;
        /*0020*/                   LDGDEPBAR ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/                   DEPBAR.LE SB0, 0x2 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   WARPGROUP.ARRIVE ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
        /*0080*/                   HGMMA.64x32x16.F32.BF16 R88, gdesc[UR12], R88, gsb0 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00a0*/                   MUFU.EX2 R3, R4 ;
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12].tnspB, R24, gsb0 ;
        /*00c0*/                   LDGSTS.E.BYPASS.128 [R107+0x8000], desc[UR42][R90.64], P1 ;
        /*00d0*/              @!P0 LDGSTS.E [R154+0x18000], desc[UR42][R94.64], P6 ;
        /*00e0*/                   LDG.E.64 R4, desc[UR4][R8.64] ;
        /*00f0*/                   LDGDEPBAR ;
        /*0100*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0110*/               @P1 BRA `(.L_x_0) ;
        /*0120*/                   EXIT ;
.L_x_8:
        /*0130*/                   BRA `(.L_x_8);
        /*0140*/                   NOP;
.L_x_9:
//--------------------- .text.plain_kernel         --------------------------
.text.plain_kernel:
.L_x_10:
        /*0000*/                   LDL.LU.128 R4, [R1] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R141+0x8000], desc[UR42][R88.64], P1 ;
        /*0030*/                   DEPBAR.LE SB0, 0x0 ;
        /*0040*/               @P0 BRA `(.L_x_10) ;
.L_x_11:
        /*0050*/                   FADD R4, R4, R5 ;
        /*0060*/               @P0 BRA `(.L_x_11) ;
        /*0070*/                   EXIT ;
"""


@pytest.fixture
def loop() -> Loop:
    (loop,) = parse(CODE, USAGE)[0].loops  # the outer loop and the one that ends the program are none
    return loop


def test_reads_every_kernel_and_its_innermost_loops() -> None:
    main, plain = parse(CODE, USAGE)
    assert (main.name, main.registers, main.stack, main.spills) == ("main_kernel", 178, 24, False)
    assert (plain.name, plain.registers, plain.stack, plain.spills) == ("plain_kernel", 32, 12, True)
    assert [loop.count for loop in plain.loops] == [5, 2]
    assert [loop.count for loop in plain.main_loops] == [5]
    assert plain.main_loops[0].tensor == {"HMMA.16816": 1}


def test_atomics_are_seen() -> None:
    main, plain = parse(CODE, USAGE)
    assert main.atomics == plain.atomics == []
    added = """        /*0055*/              @!P0 RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R5 ;
        /*0056*/                   ATOMG.E.ADD.STRONG.GPU PT, R3, [R2.64], R5 ;
        /*0057*/                   REDUX.SUM UR4, R5 ;
        /*0058*/                   ATOMS.OR RZ, [UR5], R4 ;
        /*0060*/               @P0 BRA `(.L_x_11) ;"""
    place = "        /*0060*/               @P0 BRA `(.L_x_11) ;"
    (_, found) = parse(CODE.replace(place, added), USAGE)
    assert found.atomics == ["RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "ATOMG.E.ADD.STRONG.GPU"]


def test_counts_of_a_loop(loop: Loop) -> None:
    assert loop.count == 13
    assert loop.tensor == {"HGMMA.64x64x16": 1, "HGMMA.64x32x16": 1, "HGMMA.64x128x16": 1}
    assert (loop.waits, loop.tensor_waits, loop.barriers, loop.local) == ([2], [1], 1, 0)
    assert (loop.copies, loop.small_copies, dict(loop.loads)) == (2, 1, {8: 1})


def test_tensor_clocks(loop: Loop) -> None:
    """N / 2, but A and B of the narrow one take longer to read: 64 and 32 rows of 32 bytes at 128 a clock."""
    assert loop.tensor_clocks(4) == 32 + 24 + 64
    assert loop.tensor_clocks(8) == 2 * loop.tensor_clocks(4)
    assert parse(CODE, USAGE)[1].loops[0].tensor_clocks(4) == 6.5


def test_useful_share(loop: Loop) -> None:
    needed = 64 * 16 * (64 + 32 + 128)
    assert loop.useful_share(4, needed) == 1
    assert loop.useful_share(8, needed) == 0.5  # two warp groups for one tile


def test_faults_name_what_is_wrong(loop: Loop) -> None:
    needed = loop.multiply_adds(8)
    assert loop.faults(8, needed) == ["1 copies under 16 bytes in a loop"]
    assert loop.faults(8, needed, elements=8) == []
    assert loop.faults(8, needed, elements=7) == loop.faults(8, needed) == loop.faults(8, None)
    assert any("multiply-adds" in fault for fault in loop.faults(8, needed // 2))
    spilled = parse(CODE, USAGE)[1].loops[0]
    found = " ".join(spilled.faults(4, spilled.multiply_adds(4)))
    assert "waits for the copy" in found
    assert "spilled" in found


def test_modelled_clocks(loop: Loop) -> None:
    model = loop.modelled(8)
    assert (model.busiest, model.overlapped, model.serial) == ("tensor", 240, 240 + 13 * 2)
    slow, fast = model.tflops(loop.multiply_adds(8))
    assert slow < fast < 990


def test_a_cubin_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        parse(CODE, "nothing")


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "ctas"),
    [(178, 98304, 8, 1), (128, 98304, 8, 2), (255, 0, 4, 2), (32, 0, 4, 16), (32, 113 * 1024, 4, 2), (16, 0, 1, 32)],
)
def test_ctas_per_sm(registers: int, shared: int, warps: int, ctas: int) -> None:
    assert ctas_per_sm(registers, shared, warps) == ctas
